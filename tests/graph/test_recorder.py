"""The CPU recorder: replays on frozen addresses, shared memory, and what it keeps alive (nothing)."""

from __future__ import annotations

import gc

import pytest
import torch
from recorder_world import Served
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from anyattn.core.graph.recorder import RecorderPlatform, record_call
from anyattn.errors import GraphError


def test_a_replay_computes_on_the_same_memory_without_python() -> None:
    x, out, calls = torch.arange(6.0), torch.zeros(3), []

    def body() -> None:
        calls.append("ran")
        columns = (x * 2).view(2, 3).t()
        out.copy_(columns.sum(1))

    graph = RecorderPlatform().new_graph()
    graph.capture(body)
    x.fill_(1.0)
    graph.replay()
    assert out.tolist() == [4.0, 4.0, 4.0]
    x.fill_(2.0)
    graph.replay()
    assert out.tolist() == [8.0, 8.0, 8.0]
    assert calls == ["ran"]
    assert graph.operations == ("aten.mul.Tensor", "aten.sum.dim_IntList", "aten.copy_.default")


def test_results_that_are_held_are_written_again_where_they_are() -> None:
    x, held = torch.ones(4), {}

    def body() -> None:
        held["sum"] = x + 1
        held["view"] = held["sum"][1:3]

    graph = RecorderPlatform().new_graph()
    graph.capture(body)
    address = held["sum"].data_ptr()
    x.fill_(5.0)
    graph.replay()
    assert held["sum"].tolist() == [6.0] * 4
    assert held["view"].tolist() == [6.0, 6.0]
    assert held["sum"].data_ptr() == address
    assert graph.kept_bytes() == 16


def test_in_place_slices_and_numbers_are_recorded() -> None:
    x, index = torch.zeros(5), torch.tensor([1, 3])

    def body() -> None:
        x[:1] = 7
        x[1:].add_(1)
        x.index_fill_(0, index, 9.0)
        x[x > 8] = 2.0

    graph = RecorderPlatform().new_graph()
    graph.capture(body)
    x.zero_()
    index.copy_(torch.tensor([2, 4]))
    graph.replay()
    assert x.tolist() == [7.0, 1.0, 2.0, 1.0, 2.0]


def test_lists_read_by_the_body_are_frozen() -> None:
    """As on a device: what Python chose during the capture stays chosen."""
    x, out, rows = torch.arange(4.0), torch.zeros(2), [0, 1]

    def body() -> None:
        for i, row in enumerate(rows):
            out[i].copy_(x[row])

    graph = RecorderPlatform().new_graph()
    graph.capture(body)
    rows[:] = [2, 3]
    graph.replay()
    assert out.tolist() == [0.0, 1.0]


def test_random_numbers_are_drawn_anew() -> None:
    out = torch.zeros(8)
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: _fill(out))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    own = torch.Generator()
    with pytest.raises(GraphError, match="default one"):
        RecorderPlatform().new_graph().capture(lambda: _fill(out, own))


def _fill(out: torch.Tensor, generator: torch.Generator | None = None) -> None:
    out.copy_(torch.rand(8, generator=generator))


def test_dead_memory_is_named_before_anything_runs() -> None:
    x, others, out = torch.ones(2), [torch.ones(2)], torch.zeros(2)

    def body() -> None:
        out.add_(1)
        out.add_(x * others[0])

    graph = RecorderPlatform().new_graph()
    graph.capture(body)
    others.clear()
    gc.collect()
    before = out.clone()
    with pytest.raises(
        GraphError, match=r"freed memory.*float32 \[2\].*aten\.mul.*_recorder\.py.*x \* other"
    ):
        graph.replay()
    assert torch.equal(out, before)


def test_memory_that_moved_is_found() -> None:
    x, out = torch.ones(2), torch.zeros(2)
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: _copy(x, out))
    x.resize_(1 << 16)
    with pytest.raises(GraphError, match="has moved"):
        graph.replay()


def _copy(source: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source * 1)


def test_temporaries_are_freed_and_counted() -> None:
    x, out = torch.ones(256), torch.zeros(256)

    def body() -> None:
        y = x
        for _ in range(10):
            y = y + 1
        out.copy_(y)

    platform = RecorderPlatform()
    graph, other = platform.new_graph(), platform.new_graph()
    graph.capture(body)
    assert graph.kept_bytes() == 0
    assert graph.peak_bytes() == 2 * 1024, "two of the ten live at a time"
    other.capture(body)
    assert platform.memory_bytes() == 2 * 1024, "graphs share memory for temporaries"
    graph.replay()
    assert out[0] == 11
    del graph, other
    gc.collect()
    assert platform.memory_bytes() == 0


def test_poison_shows_results_that_another_graph_may_overwrite() -> None:
    x, held = torch.ones(3), {}
    platform = RecorderPlatform(poison=True)
    small, large = platform.new_graph(), platform.new_graph()
    small.capture(lambda: held.update(small=x + 1))
    large.capture(lambda: held.update(large=x + 2))
    assert held["small"].isnan().all(), "a capture computes nothing"
    small.replay()
    assert held["small"].tolist() == [2.0] * 3
    large.replay()
    assert held["large"].tolist() == [3.0] * 3
    assert held["small"].isnan().all(), "stale use of a shared pool"


def test_poison_shows_memory_that_nobody_wrote() -> None:
    out = torch.zeros(4)

    def body() -> None:
        scratch = torch.empty(4)
        scratch[:2] = 1.0
        out.copy_(scratch)

    graph = RecorderPlatform(poison=True).new_graph()
    graph.capture(body)
    graph.replay()
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2:].isnan().all()


def test_outside_memory_is_listed() -> None:
    x, out = torch.ones(4), torch.zeros(4)
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: _copy(x[2:], out[2:]))
    assert {(o.address, o.nbytes) for o in graph.outside} == {(t.data_ptr(), 16) for t in (x, out)}


def test_an_opaque_call_is_one_step() -> None:
    x, out, seen = torch.ones(3), torch.zeros(3), []

    def kernel(source: torch.Tensor, target: torch.Tensor) -> None:
        seen.append(source.tolist())  # unseen by the capture: it is inside a kernel
        target.copy_(source * 2)

    record_call(kernel, [x, out], "kernel")
    assert out.tolist() == [2.0] * 3, "outside a capture it just runs"
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: record_call(kernel, [x + 1, out], "kernel"))
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [10.0] * 3
    assert graph.operations == ("aten.add.Tensor", "kernel")
    assert seen == [[1.0] * 3, [2.0] * 3, [5.0] * 3]


@torch.library.custom_op("anyattn_test::twice", mutates_args=("out",))
def twice(x: torch.Tensor, out: torch.Tensor) -> None:
    """An op with a Python body."""
    out.copy_(x * 2)


def test_ops_written_in_python_are_taken_apart() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: twice(x, out))
    x.fill_(2.0)
    graph.replay()
    assert out.tolist() == [4.0] * 3
    assert graph.operations == ("aten.mul.Tensor", "aten.copy_.default")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_in_eager_mode() -> None:
    q, out, bias = torch.randn(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), torch.zeros(8)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 8, 8, device="cpu")

    def attend() -> torch.Tensor:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[j], block_mask=causal)

    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: _copy(attend(), out))
    q.normal_()
    bias.normal_()
    graph.replay()
    assert torch.equal(out, attend())


def test_compiled_functions_run_as_they_were_written() -> None:
    """Compiled code would call kernels that no mode sees: the graph would silently lack them."""
    x, out = torch.ones(3), torch.zeros(3)
    double = torch.compile(lambda t: t * 2, backend="eager")
    assert double(x).tolist() == [2.0] * 3
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: _copy(double(x), out))
    x.fill_(3.0)
    graph.replay()
    assert out.tolist() == [6.0] * 3
    assert "aten.mul.Tensor" in graph.operations


LENGTHS = (5, 24, 1)


def test_torch_native_decode_replays_with_other_contents() -> None:
    """Preparation before each replay, tables and both layers inside: bit for bit the eager step."""
    served = Served()
    served.backend.init_cuda_graph_state(served.limits)
    plan = served.backend.init_forward_metadata_out_graph(served.batch(LENGTHS), in_capture=True)
    graph = RecorderPlatform(poison=True).new_graph()
    graph.capture(lambda: served.body(plan))
    for seed in range(1, 6):
        served.shuffle(seed)
        expected = served.eager(served.batch(LENGTHS))
        served.shuffle(seed)
        for out in served.out:
            out.fill_(torch.nan)
        served.backend.init_forward_metadata_out_graph(served.batch(LENGTHS))
        graph.replay()
        for got, want in zip(served.out, expected, strict=True):
            assert torch.equal(got, want), f"seed {seed}"


def test_freed_plan_tensors_are_caught() -> None:
    """Without address-stable buffers a plan owns its tables; dropping it must not go unnoticed."""
    served = Served()
    plans = [served.backend.init_forward_metadata_out_graph(served.batch(LENGTHS))]
    graph = RecorderPlatform().new_graph()
    graph.capture(lambda: served.body(plans[0]))
    graph.replay()
    plans.clear()
    gc.collect()
    with pytest.raises(GraphError, match=r"freed memory.*the plan included"):
        graph.replay()
