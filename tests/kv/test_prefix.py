"""Prefix sharing: keys, publishing, reference counts, eviction order; and a random walk of its invariants."""

from __future__ import annotations

import random

import pytest

from anyattn.core.kv.allocator import PageAllocator
from anyattn.core.kv.prefix import PrefixCache, extend_keys
from anyattn.errors import PoolError


def keys_of(tokens: list[int], page_size: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size)
    return keys


def cache_of(pages: int, *, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PageAllocator(pages * 4, 4), enabled=enabled)


def fill(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """A request that computed `tokens`: publish its full pages, keep holding them."""
    keys = keys_of(tokens)
    pages = cache.allocate(len(keys))
    for key, page in zip(keys, pages, strict=True):
        cache.publish(key, page)
    return pages


def test_keys_cover_full_pages_and_everything_before() -> None:
    first, second = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), keys_of([0, 2, 3, 4, 5, 6, 7, 8])
    assert len(first) == 2  # the ninth token's page isn't full
    assert first[1] != second[1]  # same tokens in page 1, another page before it
    assert keys_of([1, 2, 3, 4]) == first[:1]


def test_keys_grow_as_they_would_have_been_made_at_once() -> None:
    keys: list[bytes] = []
    tokens = list(range(23))
    for n in range(24):
        extend_keys(keys, tokens[:n], 4)
    assert keys == keys_of(tokens)


def test_a_published_prefix_is_found_and_shared() -> None:
    cache = cache_of(8)
    pages = fill(cache, list(range(12)))
    found = cache.match(keys_of([*range(8), 99, 98, 97, 96]))
    assert found == pages[:2]
    assert [cache.allocator.references(p) for p in pages] == [3, 3, 2]  # owner, cache, and the finder


def test_an_unpublished_page_is_nobody_elses() -> None:
    cache = cache_of(8)
    cache.allocate(3)
    assert cache.match(keys_of(list(range(12)))) == []


def test_disabled_means_nothing_is_shared() -> None:
    cache = cache_of(8, enabled=False)
    pages = fill(cache, list(range(12)))
    assert cache.match(keys_of(list(range(12)))) == []
    cache.release(pages)
    assert cache.allocator.num_free == 8


def test_a_second_page_for_a_known_key_stays_private() -> None:
    cache = cache_of(8)
    mine, yours = fill(cache, [1, 2, 3, 4]), fill(cache, [1, 2, 3, 4])
    assert cache.match(keys_of([1, 2, 3, 4])) == mine
    cache.release(yours)
    assert cache.allocator.references(yours[0]) == 0


def test_idle_pages_are_reused_until_evicted_last_page_of_the_oldest_first() -> None:
    cache = cache_of(4)
    old, young = fill(cache, list(range(8))), fill(cache, list(range(50, 58)))
    cache.release(old)
    cache.release(young)
    assert (cache.allocator.num_free, cache.num_available) == (0, 4)
    cache.allocate(1)
    assert cache.evictions == 1
    assert cache.match(keys_of(list(range(8)))) == old[:1]  # its tail went first
    assert cache.match(keys_of(list(range(50, 58)))) == young


def test_a_match_protects_from_eviction() -> None:
    cache = cache_of(2)
    pages = fill(cache, list(range(8)))
    cache.release(pages)
    cache.match(keys_of(list(range(4))))
    with pytest.raises(PoolError, match="not enough free KV pages"):
        cache.allocate(2)
    assert cache.evictions == 0  # a refused request evicts nothing
    assert cache.allocate(1) == pages[1:]


def test_a_random_life_keeps_the_books() -> None:
    """Every page is free, idle or held; a holder's pages are never handed to another."""
    rng = random.Random(11)
    cache = cache_of(24)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(3000):
        if live and (rng.random() < 0.45 or cache.num_available < 8):
            _, pages = live.pop(rng.randrange(len(live)))
            cache.release(pages)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(4, 29))]
        keys = keys_of(tokens)
        shared = cache.match(keys)
        fresh = cache.allocate(len(keys) - len(shared))
        writable = {p for _, pages in live for p in pages} & set(fresh)
        assert not writable
        for key, page in zip(keys, [*shared, *fresh], strict=True):
            cache.publish(key, page)
        live.append((tokens, [*shared, *fresh]))
        held = {p for _, pages in live for p in pages}
        assert len(held) + cache.num_available == 24
    assert cache.evictions > 50
    for _, pages in live:
        cache.release(pages)
    assert cache.num_available == 24
