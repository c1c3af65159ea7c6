"""The hpc-ops stand-in against the oracle: conventions, refusals, traps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import emulating

LENGTHS = [7, 130, 64]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = 8e-3


@pytest.fixture(name="hpc")
def _hpc() -> Iterator[Any]:
    with emulating("hpc_ops"):
        yield importlib.import_module("hpc")


def _world(lengths: list[int], *, page: int = 64, dtype: torch.dtype = BF16, clean: bool = True) -> Pages:
    return pages(lengths, page=page, heads=2, dim=128, dtype=dtype, clean=clean)


def _map(hpc: Any, lengths: torch.Tensor, rows: int = 1) -> torch.Tensor:
    task_map = hpc.get_attention_decode_task_workspace(8, 512, 2)
    return hpc.assign_attention_decode_task(lengths, task_map, 2, rows, True)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mapped", [False, True])
def test_decode(hpc: Any, rows: int, mapped: bool) -> None:
    world, q = _world(LENGTHS), queries(3 * rows, 8, 128, BF16)
    task_map = _map(hpc, world.lengths, rows) if mapped else None
    out = hpc.attention_decode_bf16(
        q, world.keys, world.values, world.table, world.lengths, rows - 1, True, task_map=task_map
    )
    assert close(out, world.expected(q, [rows] * 3)[0], TOLERANCE)
    short = world.lengths - rows
    task_map = task_map if mapped else None
    again = hpc.attention_decode_bf16(
        q, world.keys, world.values, world.table, short, rows - 1, task_map=task_map
    )
    assert torch.equal(again, out)


def test_lengths_come_from_the_map_alone(hpc: Any) -> None:
    world, q = _world(LENGTHS), queries(3, 8, 128, BF16)
    stale = _map(hpc, world.lengths - 1)
    args = (q, world.keys, world.values, world.table, world.lengths, 0, True, True)
    fresh = hpc.attention_decode_bf16(*args)
    assert not close(hpc.attention_decode_bf16(*args, task_map=stale), fresh.double(), TOLERANCE)
    other = _map(hpc, world.lengths[:2])
    assert torch.isnan(hpc.attention_decode_bf16(*args, task_map=other)).all()
    zero = hpc.get_attention_decode_task_workspace(8, 512, 2)
    hpc.assign_attention_decode_task(world.lengths, zero, 2, 0, True)  # "mtp" as the decode call counts it
    assert torch.isnan(hpc.attention_decode_bf16(*args, task_map=zero)).all()


def test_a_strided_output_is_written_as_if_it_were_not(hpc: Any) -> None:
    world, q = _world(LENGTHS), queries(3, 8, 128, BF16)
    args = (q, world.keys, world.values, world.table, world.lengths, 0, True, True)
    wide = torch.zeros(3, 16, 128, dtype=BF16)
    right = hpc.attention_decode_bf16(*args)
    hpc.attention_decode_bf16(*args, task_map=_map(hpc, world.lengths), output=wide[:, :8])
    assert torch.equal(wide.reshape(-1)[: right.numel()], right.reshape(-1))
    hpc.attention_decode_bf16(*args, output=wide[:, :8])
    assert torch.equal(wide[:, :8], right)


def test_prefill_lengths_are_totals(hpc: Any) -> None:
    world, rows = _world(LENGTHS), [3, 1, 40]
    q = queries(44, 8, 128, BF16)
    out = hpc.attention_with_kvcache_prefill_bf16(
        q, world.keys, world.values, offsets_of(rows), world.table, world.lengths, 40
    )
    assert close(out, world.expected(q, rows)[0], TOLERANCE)
    heads_first = world.keys.transpose(1, 2).contiguous().transpose(1, 2)
    again = hpc.attention_with_kvcache_prefill_bf16(
        q, heads_first, world.values, offsets_of(rows), world.table, world.lengths, 40
    )
    assert torch.equal(again, out)


def test_other_pages_launch_nothing_and_dirty_tails_poison(hpc: Any) -> None:
    q, rows = queries(3, 8, 128, BF16), [1, 1, 1]

    def run(world: Pages) -> torch.Tensor:
        found = hpc.attention_with_kvcache_prefill_bf16(
            q, world.keys, world.values, offsets_of(rows), world.table, world.lengths, 1
        )
        assert isinstance(found, torch.Tensor)
        return found

    assert torch.isnan(run(_world(LENGTHS, page=16))).all()
    assert torch.isnan(run(_world(LENGTHS, clean=False))).any()


def test_fp8(hpc: Any) -> None:
    world, q = _world(LENGTHS, dtype=FP8), queries(3, 8, 128, FP8)
    q_scale = torch.rand(3, 8) + 0.5
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([2.0])
    want, _ = world.expected(q.float() * q_scale[:, :, None], [1, 1, 1], k_scale=0.5, v_scale=2.0)
    out = hpc.attention_decode_fp8(
        q, world.keys, world.values, world.table, world.lengths, q_scale, k_scale, v_scale, 0, True
    )
    assert out.dtype == BF16
    assert close(out, want, TOLERANCE)
    by_row = torch.zeros(3, 8, 128)
    by_row[:, :, 0] = q_scale
    out = hpc.attention_with_kvcache_prefill_fp8(
        q, world.keys, world.values, by_row, k_scale, v_scale, offsets_of([1, 1, 1]), world.table,
        world.lengths, 1,
    )  # fmt: skip
    assert close(out, want, TOLERANCE)


@pytest.mark.parametrize(
    ("page", "heads", "mtp", "text"),
    [(128, 8, 0, "blocksize"), (64, 4, 0, "4 or 8"), (64, 8, 1, "mtp"), (16, 8, 0, "32 and 64")],
)
def test_what_the_library_refuses(hpc: Any, page: int, heads: int, mtp: int, text: str) -> None:
    world, q = _world(LENGTHS, page=page), queries(3, heads, 128, BF16)
    with pytest.raises(RuntimeError, match=text):
        hpc.attention_decode_bf16(q, world.keys, world.values, world.table, world.lengths, mtp, True)


def test_half_precision_is_read_as_bfloat16(hpc: Any) -> None:
    world, q = _world(LENGTHS, dtype=torch.float16), queries(3, 8, 128, torch.float16)
    out = hpc.attention_decode_bf16(q, world.keys, world.values, world.table, world.lengths, 0, True)
    assert not close(out, world.expected(q, [1, 1, 1])[0], 0.5)
