"""Packed pools: only their own writer fills them, whole pages move, single slots don't."""

import pytest
import torch

from anyattn.core.kv.pools.packed import PackedFormat, PackedPool, Writer
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


def _typed(storage: torch.Tensor, spec: AttentionSpec, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys by dim, then row; values by head, row and dim."""
    both = storage.view(torch.float32).view(-1, 2, HEADS, page * DIM)
    return both[:, 0].unflatten(2, (DIM, page)), both[:, 1].unflatten(2, (page, DIM))


def _write_typed(storage: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    keys, values = _typed(storage, SPEC, PAGE)
    keys[loc // PAGE, :, :, loc % PAGE] = k
    values[loc // PAGE, :, loc % PAGE] = v


def _learning(write: Writer) -> PackedPool:
    packed = PackedFormat(
        "TOY", lambda spec, page: 2 * page * ROW, write, views=_typed, kv_dtype=torch.float32
    )
    return PackedPool([SPEC], packed, num_slots=4 * PAGE, page_size=PAGE, dtype=torch.float32)


def test_the_order_of_elements_is_learnt_from_the_writer() -> None:
    made = _learning(_write_typed)
    loc = torch.tensor([5, 11, 6])
    k, v = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM)
    made.write(0, loc, k, v)
    assert all(torch.equal(a, b) for a, b in zip(made.gather(0, loc), (k, v), strict=True))
    assert made.key_cache(0).shape == (5, HEADS, DIM, PAGE)
    before = made.storage(0).clone()
    for order, cache in zip(made.order(0), (made.key_cache(0), made.value_cache(0)), strict=True):
        row = order.get(cache, loc // PAGE, loc % PAGE)
        order.put(cache, loc // PAGE, loc % PAGE, -row)
    assert all(torch.equal(a, -b) for a, b in zip(made.gather(0, loc), (k, v), strict=True))
    made.write(0, loc, k, v)
    assert torch.equal(made.storage(0), before)


@pytest.mark.parametrize("fault", ["swapped", "rounded", "one_row"])
def test_writers_that_do_more_than_move_elements_are_noticed(fault: str) -> None:
    def write(storage: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if fault == "swapped":
            k, v = v, k
        if fault == "rounded":
            k = (k / 4).round() * 4
        _write_typed(storage, loc * 0 + loc[0] if fault == "one_row" else loc, k, v)

    with pytest.raises(PoolError, match="move elements"):
        _learning(write).order(0)
