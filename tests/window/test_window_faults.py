"""What must be impossible on a dual pool: reads of evicted slots, unmapped writes, pages given out twice."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.kv.pools.base import EVICTED, UNMAPPED
from anyattn.core.kv.pools.window import WindowPool, window_slots_for
from anyattn.core.kv.window_allocator import WindowAllocator
from anyattn.errors import BatchError, PoolError
from anyattn.testing.window_runs import spec
from anyattn.testing.windows import Served


def served_past_its_window() -> tuple[Served, WindowPool, WindowAllocator]:
    served = Served([spec(None), spec(8)], max_context=64, max_step=32)
    assert isinstance(served.pool, WindowPool)
    assert isinstance(served.allocator, WindowAllocator)
    return served, served.pool, served.allocator


def test_a_read_of_an_evicted_slot_is_named() -> None:
    served, pool, allocator = served_past_its_window()
    request = served.admit()
    served.step({request: 20})
    allocator.evict(request.pages, 30)  # as if ten more tokens were there
    with pytest.raises(BatchError, match=r"position 13 of row \d+ was evicted from the pool of window 8"):
        served.step({request: 1}, mode="decode")
    assert int(pool.full_to_window[8][request.pages[3] * pool.page_size]) == EVICTED
    with pytest.raises(PoolError, match="was evicted in the pool of layer 1"):
        pool.to_own(1, torch.tensor([request.pages[3] * pool.page_size]))


def test_a_read_of_a_slot_that_was_never_mapped_is_named() -> None:
    served, pool, _ = served_past_its_window()
    request, other = served.admit(), served.admit()
    served.step({request: 20, other: 20})
    pool.unmap_pages(8, [other.pages[4]])
    with pytest.raises(BatchError, match="was never mapped in the pool of window 8"):
        served.step({request: 1, other: 1}, mode="decode")
    assert int(pool.full_to_window[8][other.pages[4] * pool.page_size]) == UNMAPPED


def test_a_write_without_a_window_slot_is_refused_by_what_the_host_knows() -> None:
    served, pool, allocator = served_past_its_window()
    served.backend.compiler.checks = "host"
    request = served.admit()
    request.pages = allocator.allocate(2)
    slots = [p * pool.page_size + t for p in request.pages for t in range(pool.page_size)]
    served.table.req_to_token[request.row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
    batch = anyattn.ForwardBatch.extend([request.row], [0], [8], slots)
    with pytest.raises(PoolError, match="no page in the pool of window 8"):
        served.backend.init_forward_metadata(batch)
    allocator.cover(request.pages, 0, 8)
    assert served.backend.init_forward_metadata(batch).window_locs[8].shape == (8,)


def test_pages_are_nobodys_before_they_are_given_out() -> None:
    _, pool, allocator = served_past_its_window()
    first, second = allocator.allocate(2)
    pool.map_pages(8, [first], [3])
    with pytest.raises(PoolError, match="window page that is nobody's"):
        pool.map_pages(8, [second], [3])
    with pytest.raises(PoolError, match="full page that is free"):
        pool.map_pages(8, [first], [4])
    for pages, windows in (([0], [4]), ([second], [0]), ([second], [10_000]), ([10_000], [4])):
        with pytest.raises(PoolError):
            pool.map_pages(8, pages, windows)
    with pytest.raises(PoolError, match="not mapped"):
        pool.unmap_pages(8, [second])
    with pytest.raises(PoolError, match="window with a pool"):
        pool.map_pages(9, [second], [4])


def test_a_full_window_pool_takes_nothing() -> None:
    served, pool, allocator = served_past_its_window()
    free = allocator.window_free(8)
    pages = allocator.allocate(free + 1)
    with pytest.raises(PoolError, match="not enough free pages in the pool of window 8"):
        allocator.cover(pages, 0, len(pages) * pool.page_size)
    assert allocator.window_free(8) == free
    assert served.pool is pool


def test_shared_pages_keep_their_window_until_one_holder_is_left() -> None:
    served, pool, allocator = served_past_its_window()
    request = served.admit()
    served.step({request: 6})
    allocator.retain(request.pages)
    assert allocator.serves(request.pages, 6)
    assert allocator.evict(request.pages, 40) == 0
    allocator.release(request.pages)
    assert allocator.evict(request.pages, 40) == 2
    assert not allocator.serves(request.pages, 6)
    assert not any(pool.is_mapped(8, p) for p in request.pages)


def test_sizes_that_cannot_be() -> None:
    decision = anyattn.select([spec(None), spec(8)], dtype=torch.float32, device="cpu", page_size=4)
    for window_slots in (6, 0, {9: 8}, {}):
        with pytest.raises(PoolError):
            anyattn.kv.create_pool(decision, num_slots=64, window_slots=window_slots)
    plain = anyattn.select([spec(None)], dtype=torch.float32, device="cpu", page_size=4)
    with pytest.raises(PoolError, match="no layer has a window"):
        anyattn.kv.create_pool(plain, num_slots=64, window_slots=8)


def test_kv_is_not_shared_across_pools() -> None:
    decision = anyattn.select([spec(None), spec(8, kv_shared_with=0)], dtype=torch.float32, device="cpu")
    anyattn.kv.create_pool(decision, num_slots=64)
    with pytest.raises(PoolError, match="in another pool"):
        anyattn.kv.create_pool(decision, num_slots=64, window_slots=64)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_the_advised_size_always_suffices(page_size: int, window: int) -> None:
    served = Served(
        [spec(window, num_q_heads=1, num_kv_heads=1, head_dim=8)],
        page_size=page_size, max_requests=3, max_context=96, max_step=20,
    )  # fmt: skip
    assert isinstance(served.pool, WindowPool)
    assert served.pool.window_slots[window] == window_slots_for(window, page_size, 3, 20)
    requests = [served.admit() for _ in range(3)]
    for counts in ((1, 18, 1), (17, 1, 2), (6, 7, 7), (1, 1, 18), (19, 1, 0), (1, 1, 1)):
        new = {r: n for r, n in zip(requests, counts, strict=True) if n}
        assert served.step(new) < 2e-5
