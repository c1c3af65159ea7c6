"""Eager decode steps on plans that were used before: the same output as on a backend that makes each anew."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

import anyattn
from anyattn.core.plan import Plan
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.mutants.patching import Mutant, applied

HEADS, SIZE, CONTEXT, REQUESTS, PAGE = (4, 2), 16, 200, 6, 4


class World:
    """One pool and table, and two backends on them: `new` forgets its plans."""

    def __init__(self, windows: tuple[int | None, ...] = (None, None)) -> None:
        specs = [
            anyattn.AttentionSpec(
                num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=SIZE, sliding_window=window
            )
            for window in windows
        ]
        offer_triton()
        limits = anyattn.Limits(max_requests=REQUESTS, max_tokens=REQUESTS, max_context=CONTEXT)
        decision = anyattn.select(
            specs, dtype="float32", device="cpu", backend="triton", page_size=PAGE, limits=limits
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=REQUESTS * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=REQUESTS, max_context=CONTEXT)
        slots = torch.randperm(REQUESTS * CONTEXT // PAGE)[:, None] * PAGE + torch.arange(PAGE) + PAGE
        self.table.req_to_token[:REQUESTS] = slots.reshape(REQUESTS, CONTEXT).int()
        for i in range(len(specs)):
            self.pool.key_cache(i)[1:].normal_()
            self.pool.value_cache(i)[1:].normal_()
        self.old, self.new = (anyattn.create_backend(decision, self.pool, self.table) for _ in range(2))
        self.layers = [anyattn.AttentionLayer(spec, i) for i, spec in enumerate(specs)]
        self.decision = decision

    def batch(self, lens: list[int]) -> anyattn.ForwardBatch:
        rows = random.sample(range(REQUESTS), len(lens))
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, lens, strict=True)]
        return anyattn.ForwardBatch.decode(rows, lens, loc)

    def run(self, backend: Any, plan: Plan, batch: anyattn.ForwardBatch, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        out = torch.randn(batch.batch_size, HEADS[0] * SIZE)
        k, v = (torch.randn(batch.batch_size, HEADS[1] * SIZE) for _ in range(2))
        with anyattn.forward_context(backend, plan):
            for layer in self.layers:
                out = layer(out, k, v, batch)
        return out

    def step(self, lens: list[int], seed: int) -> int:
        """Both agree. Returns where the plan lies."""
        batch = self.batch(lens)
        plan = self.old.init_forward_metadata(batch)
        got = self.run(self.old, plan, batch, seed)
        self.new._eager._plans.clear()
        want = self.run(self.new, self.new.init_forward_metadata(batch), batch, seed)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        return plan.seq_lens.data_ptr()


@pytest.mark.parametrize("windows", [(None, None), (9, None), (5, 5)])
def test_steps_on_plans_that_were_used(windows: tuple[int | None, ...]) -> None:
    world, places = World(windows), []
    for step in range(6):
        places.append(world.step([100 + step, 101, 99], step))
    assert len(set(places)) == 1
    random.seed(1)
    for step in range(12):
        count = random.choice([1, 2, 3, 3])
        world.step([random.randint(1, CONTEXT) for _ in range(count)], step)


@pytest.mark.parametrize("steps", [1, 3])
def test_lengths_that_call_for_other_tiles(steps: int) -> None:
    """Even requests are cut alike; a plan for those isn't used for one long request among short ones, even
    if it was used before.
    """
    world, tiles = World(), []
    for step in range(steps):
        even = world.old.init_forward_metadata(world.batch([150, 151 + step, 150]))
        tiles = [each.tiles for each in even.private.decode.values()]
        del even
        gc.collect()  # the interpreter leaves cycles that hold what kernels were given
    uneven = world.old.init_forward_metadata(world.batch([CONTEXT, 1, 1]))
    chosen = [each.tiles for each in uneven.private.decode.values()]
    fresh = world.new.init_forward_metadata(uneven.batch)
    assert chosen == [each.tiles for each in fresh.private.decode.values()]
    assert chosen != tiles


def replaced_pool(world: World) -> None:
    world.old.init_forward_metadata(world.batch([9, 9]))
    gc.collect()
    world.old.pool = anyattn.kv.create_pool(world.decision, num_slots=REQUESTS * CONTEXT)
    assert world.old.init_forward_metadata(world.batch([10, 10])).private.pool is world.old.pool


def replaced_table(world: World) -> None:
    world.old.init_forward_metadata(world.batch([9, 9]))
    gc.collect()
    world.table.req_to_token = world.table.req_to_token.clone()
    plan = world.old.init_forward_metadata(world.batch([11, 11]))
    for step in plan.private.decode.values():
        assert step.source is world.table.req_to_token


PROMISES = {
    "the pool": ("step.pool is not self.pool", "False", replaced_pool),
    "the request table": ("each.source is not source", "False", replaced_table),
    "tiles": (" is each.tiles", " is not None", lambda world: test_lengths_that_call_for_other_tiles(1)),
    "lengths since the last time": (
        "step.suits.get(lengths)", "next(iter(step.suits.values()), None)",
        lambda world: test_lengths_that_call_for_other_tiles(3),
    ),
    "lengths of another batch": (
        "serial != batch.serial", "not serial", lambda world: test_lengths_that_call_for_other_tiles(3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROMISES)
def test_what_was_replaced_is_noticed(what: str) -> None:
    old, new, promise = PROMISES[what]
    promise(World())
    where = "anyattn.backends.portable.triton:TritonAttention.renews"
    fault = Mutant(name=what, where=where, old=old, new=new, names=())
    with applied(fault), pytest.raises(AssertionError):
        promise(World())
