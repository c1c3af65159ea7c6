"""Captured steps of `ascend`: lists of lengths follow the batch, in the recorder and in `AscendGraph`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from npu_stand import standing
from npu_steps import DENSE, LATENT, World, world

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.host_arguments import note_host_arguments
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.errors import GraphError
from anyattn.platforms.ascend_graphs import AscendGraphPlatform

# -- the adapter under the runner ------------------------------------------------------------------------


def runner(made: World, mode: ForwardMode, tokens: int) -> GraphRunner:
    """A graph of one layer, for four requests."""
    spec, count = made.spec, 4 * tokens
    q = torch.zeros(count, spec.num_q_heads, spec.head_dim, dtype=made.dtype)
    k = torch.zeros(count, spec.num_kv_heads, spec.head_dim, dtype=made.dtype)
    inputs = {"q": q, "k": k}
    if spec.mla is None:
        inputs["v"] = k.clone()

    def body(batch: anyattn.ForwardBatch, **given: torch.Tensor) -> Any:
        return made.layer(given["q"], given["k"], given.get("v"), batch)

    limits = made.backend.config.limits
    made_runner = GraphRunner(
        made.backend, body, RecorderPlatform(), limits=limits, inputs=inputs, buckets=Buckets((4,))
    )
    made_runner.capture(mode, tokens_per_request=tokens)
    return made_runner


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("latent", [False, True])
def test_replays_have_the_lengths_of_their_batch(latent: bool, tokens: int) -> None:
    spec, dtype = (LATENT, torch.bfloat16) if latent else (DENSE, torch.float16)
    with standing():
        made = world(spec, dtype=dtype)
        mode = ForwardMode.DECODE if tokens == 1 else ForwardMode.TARGET_VERIFY
        graph = runner(made, mode, tokens)
        made.batch("decode")  # fills the pool: up to 699 tokens
        for prefix in ([1, 130, 300], [600, 2], [127, 128, 129, 640]):
            rows = [4, 3, 2, 1][: len(prefix)]
            lens = [min(p, (0, 127, 128, 300, 699)[r]) for p, r in zip(prefix, rows, strict=True)]
            new = torch.cat([made.slots[r][n : n + tokens] for r, n in zip(rows, lens, strict=True)])
            for row in rows:
                made.table.req_to_token[row] = made.slots[row][:1024].int()
            q, k, v = made.inputs(len(rows) * tokens, materialised=False)
            given = {"q": q, "k": k} | ({} if v is None else {"v": v})

            def batch(rows: list[int] = rows, lens: list[int] = lens, new: torch.Tensor = new) -> Any:
                if tokens == 1:
                    return anyattn.ForwardBatch.decode(rows, [n + 1 for n in lens], new)
                return anyattn.ForwardBatch.verify(rows, lens, [tokens] * len(rows), new)

            replayed = graph.replay(batch(), **given).clone()
            eager = batch()
            plan = made.backend.init_forward_metadata(eager)
            with anyattn.forward_context(made.backend, plan):
                assert torch.equal(made.layer(q, k, v, eager), replayed)


def test_a_step_with_rows_behind_its_requests_is_not_captured() -> None:
    with standing():
        made = world()
        made.backend.init_cuda_graph_state(made.backend.config.limits)
        loc = [*made.slots[0][:4].tolist(), 0, 0]
        batch = anyattn.ForwardBatch.verify([0], [0], [4], loc, num_padding_tokens=2)
        with pytest.raises(GraphError, match="rows behind"):
            made.backend.init_forward_metadata_out_graph(batch, in_capture=True)


# -- the graph object ------------------------------------------------------------------------------------


@dataclass
class FakeNPU:
    """`torch.npu` as far as graphs need it; `log` says what happened, in order."""

    records: int = 1
    log: list[Any] = field(default_factory=list)
    pools: list[Any] = field(default_factory=list)

    def NPUGraph(self) -> Any:
        graph = SimpleNamespace(graph_dispatch_mode=SimpleNamespace(graph_dispatch_records=[]))
        graph.replay = lambda: self.log.append("replay")
        graph.update = lambda cpu_update_input: self.log.append(("update", cpu_update_input))
        return graph

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, *, auto_dispatch_capture: bool = False) -> Iterator[None]:
        assert auto_dispatch_capture
        self.pools.append(pool)
        yield
        graph.graph_dispatch_mode.graph_dispatch_records.extend([None] * self.records)

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.log.append("record"), synchronize=lambda: self.log.append("wait")
        )

    def graph_pool_handle(self) -> str:
        return "pool"

    def synchronize(self) -> None: ...

    def memory_reserved(self) -> int:
        return 1 << 20 if self.pools else 0


def test_lists_are_read_at_each_replay_and_put_in_place_behind_it() -> None:
    npu = FakeNPU(records=2)
    graph = AscendGraphPlatform(npu).new_graph()
    lens = {"actual_seq_lengths_kv": [1, 1]}

    def body() -> None:
        note_host_arguments(lambda: lens)
        note_host_arguments(lambda: {"actual_seq_kvlen": lens["actual_seq_lengths_kv"]})

    graph.capture(body)
    assert npu.log == []
    lens["actual_seq_lengths_kv"] = [7, 8]
    graph.replay()
    update = ("update", [{"actual_seq_lengths_kv": [7, 8]}, {"actual_seq_kvlen": [7, 8]}])
    assert npu.log == ["replay", update, "record"]
    lens["actual_seq_lengths_kv"] = [9, 9]
    graph.replay()
    assert npu.log[3:5] == ["wait", "replay"]  # the first replay is over before its events are set again
    assert npu.log[5][1][0] == {"actual_seq_lengths_kv": [9, 9]}


def test_graphs_without_lists_wait_for_nothing() -> None:
    npu = FakeNPU(records=0)
    platform = AscendGraphPlatform(npu)
    graph = platform.new_graph()
    graph.capture(lambda: None)
    graph.replay()
    assert npu.log == ["replay"]
    assert npu.pools == ["pool"]
    assert platform.memory_bytes() == 1 << 20


@pytest.mark.parametrize(("records", "noted"), [(1, 0), (0, 1), (2, 1)])
def test_lists_that_nobody_can_update_are_refused(records: int, noted: int) -> None:
    graph = AscendGraphPlatform(FakeNPU(records=records)).new_graph()

    def body() -> None:
        for _ in range(noted):
            note_host_arguments(dict)

    with pytest.raises(GraphError, match="one for one"):
        graph.capture(body)
    with pytest.raises(GraphError, match="before a capture"):
        graph.replay()


def test_segments_are_recorded_in_a_block() -> None:
    npu = FakeNPU(records=1)
    platform = AscendGraphPlatform(npu)
    first, second = platform.new_graph(), platform.new_graph()
    with first.recording():
        note_host_arguments(lambda: {"actual_seq_kvlen": [1]})
    with second.recording(after=first):
        note_host_arguments(lambda: {"actual_seq_kvlen": [2]})
    second.replay()
    assert npu.log[1] == ("update", [{"actual_seq_kvlen": [2]}])
    assert npu.pools == ["pool", "pool"]


def test_capturing_twice_and_without_an_npu() -> None:
    graph = AscendGraphPlatform(FakeNPU(records=0)).new_graph()
    graph.capture(lambda: None)
    with pytest.raises(GraphError, match="captured already"):
        graph.capture(lambda: None)
    with pytest.raises(GraphError, match="torch-npu"):
        AscendGraphPlatform()
