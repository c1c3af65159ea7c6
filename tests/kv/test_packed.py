"""Packed pools: only their own writer fills them, whole pages move, single slots don't."""

import pytest
import torch

from anyattn.core.kv.pools.packed import PackedFormat, PackedPool
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

PAGE, HEADS, DIM = 4, 2, 8
SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=HEADS, head_dim=DIM)
ROW = HEADS * DIM * 4


def _view(storage: torch.Tensor) -> torch.Tensor:
    """A toy format: rows of a page backwards, V before K."""
    return storage.view(torch.float32).view(-1, PAGE, 2, HEADS, DIM).flip(1)


def _write(storage: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    flat = storage.view(torch.float32).view(-1, PAGE, 2, HEADS, DIM)
    flat[loc // PAGE, PAGE - 1 - loc % PAGE, 0] = v
    flat[loc // PAGE, PAGE - 1 - loc % PAGE, 1] = k


def _read(storage: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _view(storage)[slots // PAGE, slots % PAGE]
    return rows[:, 1], rows[:, 0]


def pool(*, readable: bool = True) -> PackedPool:
    packed = PackedFormat("TOY", lambda spec, page: 2 * page * ROW, _write, _read if readable else None)
    return PackedPool([SPEC, SPEC], packed, num_slots=4 * PAGE, page_size=PAGE, dtype=torch.float32)


def test_what_its_writer_wrote_its_reader_reads_and_pages_move() -> None:
    made = pool()
    loc = torch.tensor([5, 11, 6])
    k, v = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM)
    made.write(1, loc, k, v)
    assert all(torch.equal(a, b) for a, b in zip(made.gather(1, loc), (k, v), strict=True))
    assert not made.storage(0).any()
    made.copy_pages(torch.tensor([1]), torch.tensor([4]))
    moved = made.gather(1, torch.tensor([4 * PAGE + 1, 4 * PAGE + 2]))
    assert torch.equal(moved[0], k[[0, 2]])
    assert made.nbytes() == 2 * 5 * 2 * PAGE * ROW


def test_slots_are_not_read_or_moved_behind_its_back() -> None:
    made = pool(readable=False)
    with pytest.raises(PoolError, match="no reader"):
        made.gather(0, torch.tensor([5]))
    with pytest.raises(PoolError, match="moved"):
        made.move(torch.tensor([5]), torch.tensor([6]))
    shared = AttentionSpec(num_q_heads=2, num_kv_heads=HEADS, head_dim=DIM, kv_shared_with=0)
    with pytest.raises(PoolError, match="share"):
        PackedPool([SPEC, shared], made.packed, num_slots=PAGE, page_size=PAGE, dtype=torch.float32)
