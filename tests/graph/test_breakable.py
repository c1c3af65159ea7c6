"""Prefill in captured segments with eager attention between them: equal to eager steps, for any batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from prefill_world import BUCKETS, CONTEXT, HEADS, SIZE, Model, World

import anyattn
from anyattn.core.graph.breakable import BreakableRunner
from anyattn.core.graph.breakable_calls import EagerCall
from anyattn.core.graph.recorder import RecorderFence, RecorderPlatform
from anyattn.core.graph.token_buckets import TokenBuckets

Make = Callable[..., tuple[World, BreakableRunner]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(7)


@pytest.fixture
def make() -> Make:
    def made(
        captured: bool = True, platform: RecorderPlatform | None = None, **options: object
    ) -> tuple[World, BreakableRunner]:
        world = World(**options)
        runner = BreakableRunner(
            world.backend, world.body, platform or RecorderPlatform(poison=True), limits=world.limits,
            inputs={"x": world.x}, token_buckets=BUCKETS,
        )  # fmt: skip
        if captured:
            runner.capture()
        return world, runner

    return made


def _equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


LENGTHS = ([8], [3, 4], [9], [16], [15], [17], [5, 1, 1, 8], [31], [16, 16], [1], [32], [2, 6], [10, 11, 9])


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6, "logit_cap": 5.0}], ids=["plain", "window"])
def test_replays_equal_eager_steps_in_every_bucket(make: Make, options: dict[str, object]) -> None:
    world, runner = make(**options)
    for new in LENGTHS:
        batch, x = world.extend(new)
        got = runner.replay(batch, x=x).clone()
        assert got.shape == x.shape
        assert torch.isfinite(got).all()
        _equal(got, world.eager(batch, x))


def test_steps_run_in_the_smallest_bucket_that_holds_them(make: Make) -> None:
    world, runner = make()
    for tokens, bucket in ((1, 8), (7, 8), (8, 8), (9, 16), (15, 16), (16, 16), (17, 32), (32, 32)):
        batch, _ = world.extend([tokens])
        assert runner.entry(batch).num_tokens == bucket
        assert runner.can_replay(batch) is None


def test_attention_runs_on_real_rows_and_padded_rows_of_static_outputs_are_zero(make: Make) -> None:
    world, runner = make()
    full, x = world.extend([16])
    runner.replay(full, x=x)
    batch, x = world.extend([2, 7])
    runner.replay(batch, x=x)
    entry = runner.entry(batch)
    calls = [step for step in entry.steps if isinstance(step, EagerCall)]
    assert (len(calls), entry.num_graphs, entry.num_tokens) == (2, 3, 16)
    for call in calls:
        assert call.out.shape == (16, HEADS[0] * SIZE)
        assert torch.all(call.out[9:] == 0)
        assert torch.all(call.out[:9].abs().sum(1) > 0)


def test_inputs_behind_the_step_are_zero(make: Make) -> None:
    world, runner = make()
    full, x = world.extend([16])
    runner.replay(full, x=x)
    batch, x = world.extend([11])
    runner.replay(batch, x=x)
    assert torch.equal(world.x[:11], x)
    assert torch.all(world.x[11:16] == 0)


def test_outputs_are_shared_by_buckets_and_not_by_layers(make: Make) -> None:
    _, runner = make()
    entries = [runner._captured[size] for size in BUCKETS.sizes]
    by_layer = [
        {call.out.data_ptr() for call in entry.steps if isinstance(call, EagerCall)} for entry in entries
    ]
    assert by_layer[0] == by_layer[1] == by_layer[2]
    assert len(by_layer[0]) == 2
    assert runner.output_bytes == 2 * BUCKETS.largest * HEADS[0] * SIZE * 4


def test_a_replay_runs_none_of_the_models_python(make: Make) -> None:
    world, runner = make()
    batch, x = world.extend([6])
    want = world.eager(batch, x)
    held, world.model = world.model, None
    assert held is not None
    _equal(runner.replay(batch, x=x), want)


def test_weights_changed_in_place_are_seen(make: Make) -> None:
    world, runner = make()
    batch, x = world.extend([5])
    with torch.no_grad():
        world.model.back[1].weight.mul_(2)
    _equal(runner.replay(batch, x=x).clone(), world.eager(batch, x))


def test_one_set_of_segments_serves_every_mode(make: Make) -> None:
    world, runner = make()
    prefix, new = [9, 30, 4], [6, 1, 1]
    loc = world.slots([2, 0, 3], prefix, new)
    drafts = world.slots([1, 2], [5, 17], [3, 3])
    batches = [
        anyattn.ForwardBatch.mixed([2, 0, 3], prefix, new, loc),
        anyattn.ForwardBatch.decode([0, 3], [31, 5], world.slots([0, 3], [30, 4], [1, 1])),
        anyattn.ForwardBatch.verify([1, 2], [5, 17], [3, 3], drafts),
    ]
    for batch in batches:
        x = torch.randn(batch.num_tokens, world.x.shape[1])
        _equal(runner.replay(batch, x=x).clone(), world.eager(batch, x))


def test_padding_that_the_batch_brings_stays_zero(make: Make) -> None:
    world, runner = make()
    batch, x = world.extend([3, 2])
    padded = batch.view(
        num_tokens=7,
        num_padding_tokens=2,
        out_cache_loc=torch.cat([batch.out_cache_loc, torch.zeros(2).long()]),
    )
    x = torch.cat([x, torch.zeros(2, x.shape[1])])
    got = runner.replay(padded, x=x)
    call = next(step for step in runner.entry(padded).steps if isinstance(step, EagerCall))
    assert torch.all(call.out[5:8] == 0)
    _equal(got[:5].clone(), world.eager(batch, x[:5]))


def test_kv_of_the_step_is_written_once_and_the_capture_writes_none(make: Make) -> None:
    world, runner = make(captured=False)
    before = [world.pool.key_cache(i).clone() for i in range(2)]
    runner.capture()
    assert all(torch.equal(world.pool.key_cache(i), before[i]) for i in range(2))
    batch, x = world.extend([4])
    runner.replay(batch, x=x)
    stored = world.pool.key_cache(0).flatten(0, 1)[batch.out_cache_loc]
    assert not torch.equal(stored, before[0].flatten(0, 1)[batch.out_cache_loc])


@pytest.mark.parametrize("flat", [True, False])
def test_lse_outputs_and_calls_without_storing(flat: bool) -> None:
    world = World(layers=1)
    layer, model = world.model.attention[0], Model(world.model.attention[0].spec, 1, flat=flat)
    del model.attention

    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = model.qkv[0](x).split(model.rows, dim=1)
        if not flat:
            q, k, v = (t.unflatten(1, (-1, SIZE)) for t in (q, k, v))
        out, lse = layer(q, k, v, batch, return_lse=True, save_kv_cache=False)
        return {"out": out * 2, "lse": lse + 1}

    runner = BreakableRunner(
        world.backend, body, RecorderPlatform(poison=True), limits=world.limits, inputs={"x": world.x},
        token_buckets=TokenBuckets([8]),
    )  # fmt: skip
    runner.capture()
    batch, x = world.extend([3, 2])
    before = world.pool.key_cache(0).clone()
    got = {name: value.clone() for name, value in runner.replay(batch, x=x).items()}
    assert torch.equal(world.pool.key_cache(0), before)
    world.body = body
    want = world.eager(batch, x)
    for name in ("out", "lse"):
        _equal(got[name], want[name])
    call = next(step for step in runner.entry(batch).steps if isinstance(step, EagerCall))
    assert torch.all(torch.isneginf(call.lse[5:]))


def test_segments_may_read_the_plan_where_it_is_captured() -> None:
    world = World()

    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        plan = anyattn.current_context().plan
        turned = x * torch.cos(plan.positions[: x.shape[0], None] / 7)
        ends = plan.query_offsets[1:].float()
        return world.model(turned, batch) + ends.max() + plan.seq_lens.sum()

    runner = BreakableRunner(
        world.backend, body, RecorderPlatform(poison=True), limits=world.limits, inputs={"x": world.x},
        token_buckets=BUCKETS, captured_metadata=True,
    )  # fmt: skip
    runner.capture()
    world.body = body
    for new in ([3, 4], [8], [17], [2, 2, 2, 2], [1], [30]):
        batch, x = world.extend(new)
        _equal(runner.replay(batch, x=x).clone(), world.eager(batch, x))
        slots = runner.entry(batch).metadata.listed_loc
        assert slots[: sum(new)].tolist() == batch.out_cache_loc.tolist()
        assert torch.all(slots[sum(new) :] == 0)
    positions = torch.arange(100, 105)
    batch, x = world.extend([5], positions=positions)
    _equal(runner.replay(batch, x=x).clone(), world.eager(batch, x))


class _Overwriting(RecorderFence):
    """What a scheduler does behind `read_done`: it writes its tables and lists for the next step."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.then = log, lambda: None

    def record(self) -> None:
        self.log.append("read done")
        self.then()


class _Watched(RecorderPlatform):
    def __init__(self) -> None:
        super().__init__(poison=True)
        self.log: list[str] = []

    def new_fence(self) -> RecorderFence:
        return _Overwriting(self.log)

    def spoil_others(self, graph: object) -> None:
        self.log.append("graph")
        super().spoil_others(graph)


def test_behind_read_done_the_scheduler_may_overwrite_its_tables(make: Make) -> None:
    world, runner = make(platform=_Watched())
    batch, x = world.extend([6, 5])
    want = world.eager(batch, x)
    table = world.table.req_to_token.clone()
    runner.platform.log.clear()
    runner.read_done.then = lambda: (world.table.req_to_token.fill_(0), batch.seq_lens.fill_(1))
    _equal(runner.replay(batch, x=x).clone(), want)
    assert runner.platform.log == ["read done", "graph", "graph", "graph"]
    world.table.req_to_token.copy_(table)


def test_read_done_is_last_where_kernels_read_the_live_table(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, runner = make(platform=_Watched())
    late = world.backend.traits(anyattn.ForwardMode.EXTEND)
    late = type(late)(**{**vars(late), "shared_read_ends": anyattn.core.traits.SharedReadEnds.POST_REPLAY})
    monkeypatch.setattr(world.backend, "traits", lambda mode: late)
    runner._traits.clear()
    runner.platform.log.clear()
    batch, x = world.extend([6])
    runner.replay(batch, x=x)
    assert runner.platform.log == ["graph", "graph", "graph", "read done"]


def test_memory_is_told_for_each_bucket(make: Make) -> None:
    _, runner = make()
    assert [tokens for tokens, _ in runner.memory()] == [32, 16, 8]
    assert all(nbytes > 0 for _, nbytes in runner.memory())


def test_default_buckets_pad_by_a_quarter_at_most_once_steps_are_long() -> None:
    buckets = TokenBuckets.up_to(3000)
    assert buckets.sizes[:7] == (16, 32, 64, 128, 256, 320, 384)
    assert buckets.largest == 3000
    assert all(buckets.fit(n) < 1.25 * n + 1 for n in range(257, 3001))
    assert TokenBuckets.up_to(5).sizes == (5,)
    assert TokenBuckets.up_to(CONTEXT).sizes == (16, 32, 64)
