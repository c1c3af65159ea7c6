"""Pages of a KV pool, handed out with reference counts. Page 0 is the sink and belongs to nobody.

The allocator knows numbers only: it holds no tensor and works for any pool. Pages come out in no
particular order; a request's slots follow from its page list through `slot_range`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from anyattn.errors import PoolError

__all__ = ["PageAllocator", "pages_for", "slot_range"]


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def slot_range(pages: Sequence[int], start: int, stop: int, page_size: int) -> list[int]:
    """Slots of the tokens `start .. stop - 1` of a request that owns `pages` in this order."""
    if page_size == 1:
        return list(pages[start:stop])
    slots: list[int] = []
    for index in range(start // page_size, pages_for(stop, page_size)):
        base, first = pages[index] * page_size, index * page_size
        slots.extend(range(base + max(start - first, 0), base + min(stop - first, page_size)))
    return slots


class PageAllocator:
    """Free list and reference counts of pages `1 .. num_slots // page_size`.

    Args:
        num_slots: usable token slots of the pool, the sink page not counted.
        page_size: tokens a page holds.
        seed: hand pages out in this random order (None = ascending at first). Nothing may depend on it.

    Raises:
        PoolError: fewer slots than one page.
    """

    def __init__(self, num_slots: int, page_size: int, *, seed: int | None = None) -> None:
        self.page_size = page_size
        self.num_pages = num_slots // page_size if page_size > 0 else 0
        if self.num_pages < 1:
            raise PoolError("a pool needs at least one page", asked=f"{num_slots} slots, page {page_size}")
        self._free = list(range(self.num_pages, 0, -1))
        if seed is not None:
            random.Random(seed).shuffle(self._free)
        self._refs = [0] * (self.num_pages + 1)

    @property
    def num_free(self) -> int:
        """Pages that nobody refers to."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many owners a page has."""
        return self._refs[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each.

        Raises:
            PoolError: not enough free pages; nothing was taken.
        """
        if count < 0 or count > len(self._free):
            raise PoolError(
                "not enough free KV pages",
                asked=count,
                allowed=f"0 .. {len(self._free)} of {self.num_pages}",
                hint="wait for requests to finish, evict cached pages, or make the pool larger",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference for each page.

        Raises:
            PoolError: a page that is free or does not exist.
        """
        for page in pages:
            self._check(page)
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less for each page; a page without references is free again.

        Raises:
            PoolError: a page that is free already or does not exist.
        """
        for page in pages:
            self._check(page)
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._free.append(page)

    def _check(self, page: int) -> None:
        if not 0 < page <= self.num_pages or self._refs[page] == 0:
            raise PoolError("a page that is not in use", asked=page, allowed="a page from allocate()")
