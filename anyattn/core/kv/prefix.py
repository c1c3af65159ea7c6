"""Prefix sharing at page granularity: finished pages are found again by what they and all before them hold.

A full page's key is a SHA-256 over the key of the page before it and its own token ids, so equal keys mean
equal KV. A page is published only once it is full and written: nobody shares a page that may change.
The cache holds one reference to each published page; a page that only the cache refers to is evictable,
least recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from anyattn.core.kv.allocator import PageAllocator

__all__ = ["PrefixCache", "extend_keys"]


def extend_keys(keys: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Append the keys of all full pages of `tokens` that `keys` does not have yet."""
    for index in range(len(keys), len(tokens) // page_size):
        page = array("q", tokens[index * page_size : (index + 1) * page_size])
        parent = keys[-1] if keys else b""
        keys.append(hashlib.sha256(parent + page.tobytes()).digest())


class PrefixCache:
    """Published pages by key, over an allocator. All page traffic of an engine goes through it.

    Args:
        allocator: where pages come from and go back to.
        enabled: False = nothing is published, so nothing is shared.

    Attributes:
        evictions: pages given up to make room, so far.
    """

    def __init__(self, allocator: PageAllocator, *, enabled: bool = True) -> None:
        self.allocator = allocator
        self.enabled = enabled
        self.evictions = 0
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # evictable pages, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now: free ones and evictable ones."""
        return self.allocator.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Published pages, in use or not."""
        return len(self._page_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest published prefix of `keys`, each retained for the caller."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._idle.pop(page, None)
            pages.append(page)
        self.allocator.retain(pages)
        return pages

    def has(self, key: bytes) -> bool:
        """True if a page with this key is published."""
        return key in self._page_of

    def allocate(self, count: int) -> list[int]:
        """`count` fresh pages, evicting as many idle ones as it takes.

        Raises:
            PoolError: more than `num_available`; nothing was taken or evicted.
        """
        if count <= self.num_available:
            while self.allocator.num_free < count:
                self._evict()
        return self.allocator.allocate(count)

    def publish(self, key: bytes, page: int) -> None:
        """Offer a full, written page to others. A key that is known keeps its first page."""
        if self.enabled and key not in self._page_of and page not in self._key_of:
            self.allocator.retain([page])
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Iterable[int]) -> None:
        """Give back a request's pages. Later pages become evictable before earlier ones."""
        for page in reversed(list(pages)):
            self.allocator.release([page])
            if page in self._key_of and self.allocator.references(page) == 1:
                self._idle[page] = None

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self.allocator.release([page])
        self.evictions += 1
