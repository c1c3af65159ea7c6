"""Decode steps dealt out in the launch that fills their tables: the records of a launch of their own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from metadata_cases import assert_equal, compiler, filled, poison, spec

from anyattn.core.batch import ForwardBatch
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import Limits
from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.decode_launch import DecodeStep, fill_ranges
from anyattn.kernels.triton.launch import set_hook
from anyattn.kernels.triton.metadata_launch import FusedFiller

HEADS = Heads(8, 2, 16, 16)
LIMITS = Limits(max_requests=40, max_tokens=40, max_context=2000)
UNWRITTEN = -7


def steps_of(plan: Plan, source: torch.Tensor, tiles: list[Decode]) -> list[DecodeStep]:
    """One for each table group; nothing of their ranges is written yet."""
    found = []
    for (group, table), each in zip(plan.tables.items(), tiles, strict=True):
        step = DecodeStep.of(
            source, plan.req_pool_indices, table.kv_start, table.kv_lens, group.window,
            table.form.kernel_page, HEADS, each,
        )  # fmt: skip
        step.ranges.fill_(UNWRITTEN)
        found.append(step)
    return found


def launched(call: Any) -> list[str]:
    names: list[str] = []
    previous = set_hook(lambda kernel, *_: bool(names.append(kernel.__name__)))
    try:
        call()
    finally:
        set_hook(previous)
    return names


def compare(
    rng: random.Random, lens: list[int], windows: list[int | None], tiles: list[Decode], page: int = 4
) -> None:
    made = compiler(TableForm(TableKind.REQUEST_TABLE, kernel_page=page), [spec(w) for w in windows], LIMITS)
    rows = rng.sample(range(LIMITS.max_requests), len(lens))
    batch = ForwardBatch.decode(rows, lens, list(range(len(lens))))
    want = filled(made, batch, None)
    alone = steps_of(want, made.table.req_to_token, tiles)
    for step in alone:
        fill_ranges(step)

    got = made.prepare(batch)
    poison(got)
    steps = steps_of(got, made.table.req_to_token, tiles)
    made.filler = FusedFiller(made.table, lambda plan: steps, chunk=16, block_b=16)
    names = launched(lambda: made.fill(got))
    assert names == ["metadata_kernel", *["ranges_kernel"] * (len(windows) - 1)]
    assert_equal(want, got)
    for a, b in zip(alone, steps, strict=True):
        assert torch.equal(a.ranges, b.ranges)


@pytest.mark.parametrize("seed", range(16))
def test_the_same_records(seed: int) -> None:
    rng = random.Random(seed)
    count, longest = rng.choice([1, 2, 5, 17, 40]), rng.choice([20, 300, 2000])
    lens = [rng.choice([1, rng.randint(1, longest), longest]) for _ in range(count)]
    windows = rng.choice([[None], [50], [7], [None, 33], [33, None], [1]])
    tiles = []
    for _ in windows:
        ranges, least, parts = rng.choice([1, 2, 7, 33, 64]), rng.choice([1, 2]), rng.choice([0, 0, 3])
        whole = not parts and rng.random() < 0.2
        number = count * parts if parts else count if whole else ranges
        tiles.append(Decode(16, 4, 1, number, least, not whole, parts=parts))
    compare(rng, lens, windows, tiles, page=rng.choice([1, 4, 16]))


def test_more_requests_than_a_program_sums_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "_FEW_B", 16)
    monkeypatch.setattr(decode_launch, "_BLOCK_B", 16)
    rng = random.Random(5)
    for window in (None, 100):
        lens = [rng.randint(1, 900) for _ in range(37)]
        compare(rng, lens, [window], [Decode(16, 4, 1, 9, 2)])
        compare(rng, lens, [window], [Decode(16, 4, 1, 64, 1)])


def test_a_step_of_another_table_is_dealt_out_by_itself() -> None:
    """Cross-attention reads the encoder's lengths, which the fused job doesn't know."""
    made = compiler(TableForm(TableKind.REQUEST_TABLE, kernel_page=4), [spec()], LIMITS)
    plan = made.prepare(ForwardBatch.decode([3, 1], [70, 9], [4, 5]))
    assert made.table.encoder_to_token is not None
    steps = steps_of(plan, made.table.encoder_to_token, [Decode(16, 4, 1, 5)])
    made.filler = FusedFiller(made.table, lambda plan: steps)
    assert launched(lambda: made.fill(plan)) == ["metadata_kernel", "ranges_kernel"]
    assert not (steps[0].ranges[:, :4] == UNWRITTEN).any()
