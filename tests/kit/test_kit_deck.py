"""How items are dealt to worker processes."""

from __future__ import annotations

from anyattn.testing.axes import _telling
from anyattn.testing.cases import Case
from anyattn.testing.deck import Deck, kernel_of
from anyattn.testing.plan import Item


def _items(*dims: int) -> list[Item]:
    return [
        Item("numbers", Case(prefix_lens=(n,), extend_lens=(1,), head_dim=dim, v_head_dim=dim), str(n))
        for n, dim in enumerate(dims)
    ]


def test_a_worker_keeps_to_its_kernel_until_its_items_are_done() -> None:
    items = _items(64, 128, 64, 128, 64)
    deck = Deck(items)
    first, other = deck.take(None), deck.take(None)
    assert first == (0, items[0])
    assert other == (1, items[1])
    assert deck.take(items[0]) == (2, items[2])
    assert deck.take(items[1]) == (3, items[3])


def test_a_worker_without_a_kernel_of_its_own_shares_the_longest_pile() -> None:
    items = _items(64, 128, 128, 64, 64, 64)
    deck = Deck(items)
    assert deck.take(None) == (0, items[0])
    assert deck.take(None) == (1, items[1])
    assert deck.take(None) == (3, items[3])  # three of 64 are left, one of 128


def test_every_item_is_dealt_once() -> None:
    items = _items(*(64, 128, 80) * 7)
    deck = Deck(items)
    last: list[Item | None] = [None, None]
    seen: list[int] = []
    while (taken := deck.take(last[len(seen) % 2])) is not None:
        last[len(seen) % 2] = taken[1]
        seen.append(taken[0])
    assert sorted(seen) == list(range(len(items)))
    assert deck.take(None) is None


def test_lengths_are_no_part_of_a_kernel_and_modes_are() -> None:
    one, two = _items(64, 64)
    assert kernel_of(one) == kernel_of(two)
    decode = Item("numbers", Case(mode="decode", prefix_lens=(3,), extend_lens=(1,)), "decode")
    extend = Item("numbers", Case(mode="extend", prefix_lens=(3,), extend_lens=(1,)), "extend")
    assert kernel_of(decode) != kernel_of(extend)


def test_a_range_of_group_sizes_is_tried_at_its_ends_and_where_tiles_change() -> None:
    assert _telling(range(1, 65)) == [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64]
    assert _telling([*range(10, 30), 40]) == [10, 15, 16, 17, 29, 40]
    assert _telling([6, 11, 13]) == [6, 11, 13]
