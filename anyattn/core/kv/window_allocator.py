"""Pages of a dual pool: full pages for whole requests, window pages for as long as a query can see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyattn.core.kv.allocator import PageAllocator, pages_for
from anyattn.core.kv.pools.window import WindowPool, pool_name
from anyattn.errors import PoolError

__all__ = ["WindowAllocator"]


class WindowAllocator(PageAllocator):
    """A `PageAllocator` of the pages that request tables list, which also keeps the maps of the pools behind.

    Around each step an engine calls `cover` for the tokens that the step writes, and `evict` once it was
    launched. `allocate` takes full pages (of a `UnifiedPool`: virtual ones) only, so a long prompt may be
    admitted whole: what is behind a map comes chunk by chunk, and window pages go again.

    A page that several requests hold keeps its window pages until one holder is left.
    """

    def __init__(self, pool: WindowPool, *, seed: int | None = None) -> None:
        """`seed`: hand pages of every pool out in a random order; nothing may depend on it."""
        super().__init__(pool.listed_slots - pool.page_size, pool.page_size, seed=seed)
        self.pool = pool
        self._windows = {
            window: PageAllocator(slots, pool.page_size, seed=None if seed is None else seed + (window or 0))
            for window, slots in pool.sub_pools.items()
        }

    def window_free(self, window: int | None) -> int:
        """Free pages in the pool of this window (None: the full pool, where that is behind a map)."""
        return self._windows[window].num_free

    def cover(self, pages: Sequence[int], start: int, stop: int) -> None:
        """Give tokens `start .. stop - 1` of a request that owns `pages` window pages where they have none.

        Raises:
            PoolError: too few free pages in some window pool; nothing was mapped.
        """
        touched = pages[start // self.page_size : pages_for(stop, self.page_size)]
        missing = {w: [p for p in touched if not self.pool.is_mapped(w, p)] for w in self._windows}
        for window, wanted in missing.items():
            free = self._windows[window].num_free
            if len(wanted) > free:
                raise PoolError(
                    f"not enough free pages in the {pool_name(window)}",
                    asked=len(wanted),
                    allowed=f"0 .. {free}",
                    hint="evict after each step, compute fewer new tokens a step, or see window_slots_for",
                )
        for window, wanted in missing.items():
            self.pool.map_pages(window, wanted, self._windows[window].allocate(len(wanted)))

    def evict(self, pages: Sequence[int], position: int) -> int:
        """Take back window pages that no query at `position` or later can see; how many were taken.

        Args:
            pages: a request's, in sequence order. position: where its next query stands (its tokens so far).
        """
        taken = 0
        for window in self.pool.window_slots:
            gone = pages[: max(0, position - window + 1) // self.page_size]
            alone = [p for p in gone if self.references(p) == 1 and self.pool.is_mapped(window, p)]
            self._free_window(window, alone, evicted=True)
            taken += len(alone)
        return taken

    def serves(self, pages: Sequence[int], position: int) -> bool:
        """True if all that a query at `position` sees of `pages` is still there: may a prefix be shared?"""
        stop = pages_for(position, self.page_size)
        first = {w: 0 if w is None else max(0, position - w + 1) // self.page_size for w in self._windows}
        return all(self.pool.is_mapped(w, page) for w, i in first.items() for page in pages[i:stop])

    def release(self, pages: Iterable[int]) -> None:
        """As `PageAllocator.release`; a page that nobody holds gives up its window pages too."""
        for page in pages:
            super().release([page])
            if self.references(page) == 0:
                for window in self._windows:
                    if self.pool.is_mapped(window, page):
                        self._free_window(window, [page], evicted=False)

    def _free_window(self, window: int | None, pages: list[int], *, evicted: bool) -> None:
        if pages:
            self._windows[window].release(self.pool.unmap_pages(window, pages, evicted=evicted))
