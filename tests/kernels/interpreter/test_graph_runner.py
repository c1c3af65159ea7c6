"""Graphs of the portable kernels on the CPU recorder: one capture a bucket serves every batch that fits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import anyattn
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.errors import BatchError, GraphError
from anyattn.kernels.triton.recording import recording_launches
from anyattn.testing.interpreter import offer_triton

HEADS, SIZE, CONTEXT, REQUESTS = (4, 2), 16, 40, 4


class Lab:
    """Two layers on triton, requests at shuffled pages, and the same step run eagerly."""

    def __init__(self, page: int = 4, window: int | None = None) -> None:
        spec = anyattn.AttentionSpec(
            num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=SIZE, sliding_window=window
        )
        self.limits = anyattn.Limits(max_requests=REQUESTS, max_tokens=3 * REQUESTS, max_context=CONTEXT,
                                     max_draft_tokens=4)  # fmt: skip
        offer_triton()
        decision = anyattn.select(
            [spec] * 2, dtype="float32", device="cpu", backend="triton", page_size=page, limits=self.limits
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=REQUESTS * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=REQUESTS, max_context=CONTEXT)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.layers = [anyattn.AttentionLayer(spec, i) for i in range(2)]
        pages = torch.randperm(REQUESTS * CONTEXT // page) + 1
        slots = (pages[:, None] * page + torch.arange(page)).reshape(REQUESTS, CONTEXT)
        self.table.req_to_token[:REQUESTS] = slots.int()
        for i in range(2):
            self.pool.key_cache(i).normal_()
            self.pool.value_cache(i).normal_()
            self.pool.key_cache(i)[0] = self.pool.value_cache(i)[0] = 0
        rows = self.limits.max_tokens
        self.inputs = {"q": torch.zeros(rows, HEADS[0] * SIZE), "k": torch.zeros(rows, HEADS[1] * SIZE)}

    def body(self, batch: anyattn.ForwardBatch, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = q
        for layer in self.layers:
            out = layer(out, k, k, batch)
        return out

    def decode(self, lens: list[int]) -> tuple[anyattn.ForwardBatch, dict[str, torch.Tensor]]:
        rows = random.sample(range(REQUESTS), len(lens))
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, lens, strict=True)]
        return anyattn.ForwardBatch.decode(rows, lens, loc), self.values(len(lens))

    def verify(self, lens: list[int], drafts: int) -> tuple[anyattn.ForwardBatch, dict[str, torch.Tensor]]:
        rows = random.sample(range(REQUESTS), len(lens))
        loc = [
            int(s)
            for r, n in zip(rows, lens, strict=True)
            for s in self.table.req_to_token[r, n : n + drafts]
        ]
        batch = anyattn.ForwardBatch.verify(rows, lens, [drafts] * len(lens), loc)
        return batch, self.values(drafts * len(lens))

    def values(self, rows: int) -> dict[str, torch.Tensor]:
        return {name: torch.randn(rows, x.shape[1]) for name, x in self.inputs.items()}

    def eager(self, batch: anyattn.ForwardBatch, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with anyattn.forward_context(self.backend, self.backend.init_forward_metadata(batch)):
            return self.body(batch, **inputs)


@pytest.fixture
def make() -> Callable[..., tuple[Lab, GraphRunner]]:
    def made(early: bool = False, **options: int) -> tuple[Lab, GraphRunner]:
        lab = Lab(**options)
        platform = RecorderPlatform(poison=True, seams=[recording_launches])
        runner = GraphRunner(
            lab.backend, lab.body, platform, limits=lab.limits, inputs=lab.inputs, buckets=Buckets([1, 2, 4]),
            early_tables=early,
        )  # fmt: skip
        return lab, runner

    return made


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_replays_equal_eager_steps(
    make: Callable[..., tuple[Lab, GraphRunner]], early: bool, window: int
) -> None:
    lab, runner = make(early, window=window)
    runner.capture()
    for count in (1, 2, 4, 3, 1, 4, 2):
        batch, inputs = lab.decode([random.randint(1, CONTEXT) for _ in range(count)])
        got = runner.replay(batch, **inputs).clone()
        assert got.shape == (count, HEADS[0] * SIZE)
        torch.testing.assert_close(got, lab.eager(batch, inputs), rtol=1e-5, atol=1e-5)


def test_chains_are_verified_in_a_graph(make: Callable[..., tuple[Lab, GraphRunner]]) -> None:
    lab, runner = make()
    runner.capture(anyattn.ForwardMode.TARGET_VERIFY, tokens_per_request=3)
    for count in (2, 4, 3, 1):
        batch, inputs = lab.verify([random.randint(0, CONTEXT - 3) for _ in range(count)], 3)
        got = runner.replay(batch, **inputs).clone()
        torch.testing.assert_close(got, lab.eager(batch, inputs), rtol=1e-5, atol=1e-5)


def test_refusals_leave_the_graphs_usable(make: Callable[..., tuple[Lab, GraphRunner]]) -> None:
    lab, runner = make()
    batch, inputs = lab.decode([5, 9])
    with pytest.raises(GraphError, match=r"never captured.*runner\.capture"):
        runner.replay(batch, **inputs)
    runner.capture()
    want = runner.replay(batch, **inputs).clone()
    drafts, _ = lab.verify([5], 3)
    with pytest.raises(GraphError, match="never captured"):
        runner.replay(drafts)
    five = anyattn.ForwardBatch.decode([0, 1, 2, 3, 0], [2] * 5, [4, 5, 6, 7, 8])
    with pytest.raises(GraphError, match="largest captured bucket; asked: 5; allowed: <= 4"):
        runner.replay(five)
    with pytest.raises(BatchError, match="beyond the pool"):
        runner.replay(anyattn.ForwardBatch.decode([0], [3], [10_000]))
    with pytest.raises(GraphError, match="full graph"):
        runner.capture(anyattn.ForwardMode.EXTEND)
    assert torch.equal(runner.replay(batch, **inputs), want)
    assert runner.can_replay(batch) is None
    assert "largest captured bucket" in str(runner.can_replay(five))


def test_a_graph_that_was_found_once_is_looked_for_again(
    make: Callable[..., tuple[Lab, GraphRunner]],
) -> None:
    lab, runner = make()
    runner.capture()
    batch, _ = lab.decode([5, 9])
    found = runner.entry(batch)
    assert runner.entry(lab.decode([7, 3])[0]) is found
    asked = {"encoder_out_cache_loc": torch.tensor([4])}, {"num_tokens": 3}
    for changed in asked:
        with pytest.raises(GraphError, match=r"encoder tokens are stored|one number of tokens"):
            runner.entry(batch.view(**changed))
    runner.capture()
    assert runner.entry(batch) is not found, "the old graph's memory is the new one's by now"


def test_drafts_of_one_token_and_of_none(make: Callable[..., tuple[Lab, GraphRunner]]) -> None:
    lab, runner = make()
    runner.capture(anyattn.ForwardMode.TARGET_VERIFY)
    loc = lab.table.req_to_token[0, 3:5].tolist()
    uneven = anyattn.ForwardBatch.verify([0, 1], [3, 3], [2, 0], loc)
    with pytest.raises(GraphError, match="one number of tokens"):
        runner.replay(uneven)


def test_a_replaced_pool_is_noticed(make: Callable[..., tuple[Lab, GraphRunner]]) -> None:
    lab, runner = make()
    runner.capture()
    batch, inputs = lab.decode([5])
    lab.backend.pool = Lab().pool
    with pytest.raises(GraphError, match="pool was replaced"):
        runner.replay(batch, **inputs)


def test_memory_is_told_for_each_bucket(make: Callable[..., tuple[Lab, GraphRunner]]) -> None:
    _, runner = make()
    runner.capture()
    assert [key.num_requests for key, _ in runner.memory()] == [4, 2, 1]
    assert sum(nbytes for _, nbytes in runner.memory()) > 0
