"""The page allocator: numbers, reference counts, the sink page, errors."""

from __future__ import annotations

import pytest

from anyattn.core.kv.allocator import PageAllocator, pages_for, slot_range
from anyattn.errors import PoolError


@pytest.mark.parametrize(
    ("tokens", "page", "pages"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)]
)
def test_pages_for(tokens: int, page: int, pages: int) -> None:
    assert pages_for(tokens, page) == pages


def test_every_page_but_the_sink_is_handed_out_once() -> None:
    allocator = PageAllocator(num_slots=70, page_size=16)
    pages = allocator.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]  # 70 slots hold four whole pages; page 0 is nobody's
    assert allocator.num_free == 0


def test_a_seed_changes_the_order_only() -> None:
    plain, shuffled = PageAllocator(320, 16), PageAllocator(320, 16, seed=3)
    first, second = plain.allocate(20), shuffled.allocate(20)
    assert first == list(range(1, 21))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_page_is_free_only_without_references() -> None:
    allocator = PageAllocator(32, 16)
    (page,) = allocator.allocate(1)
    allocator.retain([page])
    allocator.release([page])
    assert (allocator.references(page), allocator.num_free) == (1, 1)
    allocator.release([page])
    assert (allocator.references(page), allocator.num_free) == (0, 2)


def test_too_many_pages_take_nothing() -> None:
    allocator = PageAllocator(32, 16)
    with pytest.raises(PoolError, match=r"asked: 3; allowed: 0 \.\. 2 of 2"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize("page", [0, 1, 99, -1])
def test_releasing_or_retaining_what_is_not_in_use_is_an_error(page: int) -> None:
    allocator = PageAllocator(32, 16)
    with pytest.raises(PoolError, match="not in use"):
        allocator.release([page])
    with pytest.raises(PoolError, match="not in use"):
        allocator.retain([page])


def test_a_double_release_is_an_error() -> None:
    allocator = PageAllocator(32, 16)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(PoolError, match="not in use"):
        allocator.release(pages)


@pytest.mark.parametrize(("slots", "page"), [(15, 16), (0, 1), (16, 0)])
def test_a_pool_smaller_than_a_page_is_an_error(slots: int, page: int) -> None:
    with pytest.raises(PoolError, match="at least one page"):
        PageAllocator(slots, page)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_slot_range_agrees_with_token_by_token(page: int) -> None:
    pages = [7, 2, 9, 4] if page > 1 else list(range(90, 26, -1))
    total = len(pages) * page
    for start in range(0, total, 3):
        for stop in range(start, total, 5):
            expected = [pages[t // page] * page + t % page for t in range(start, stop)]
            assert slot_range(pages, start, stop, page) == expected
