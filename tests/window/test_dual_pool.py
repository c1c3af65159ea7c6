"""Requests far past their windows, dual pool on and off, against the oracle; every step, every layer."""

from __future__ import annotations

import pytest
import torch

from anyattn.core.groups import Space
from anyattn.core.kv.pools.window import WindowPool
from anyattn.core.kv.window_allocator import WindowAllocator
from anyattn.testing.window_runs import RUNS, spec
from anyattn.testing.windows import Served

TOLERANCE = 2e-5
PLACES = [
    ("torch_native", "cpu"),
    pytest.param(
        ("triton", "cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
    ),
]


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("place", PLACES, ids=lambda p: p[0])
def test_every_step_agrees_with_the_oracle(place: tuple[str, str], run: str, dual: bool) -> None:
    backend, device = place
    error, served = RUNS[run](backend=backend, device=device, dual=dual)
    assert error < TOLERANCE
    assert isinstance(served.pool, WindowPool) is dual


@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (16, "HND"), (4, "HND")])
def test_pages_and_layouts(page_size: int, layout: str) -> None:
    error, _ = RUNS["chunks"](page_size=page_size, layout=layout)
    assert error < TOLERANCE


def test_address_stable_buffers() -> None:
    error, served = RUNS["several_sizes"](buffers=True)
    assert error < TOLERANCE
    one = served.admit()
    served.step({one: 5})
    first = served.plan
    served.step({one: 5})
    second = served.plan
    assert first is not None
    assert second is not None
    for window, loc in first.window_locs.items():
        assert loc.data_ptr() == second.window_locs[window].data_ptr()


def test_window_layers_write_and_keep_their_own_slots_only() -> None:
    served = Served([spec(None), spec(8)], max_context=128, max_requests=2, max_step=40)
    pool, allocator = served.pool, served.allocator
    assert isinstance(pool, WindowPool)
    assert isinstance(allocator, WindowAllocator)
    assert pool.key_cache(1).shape[0] < pool.key_cache(0).shape[0]
    request = served.admit()
    served.step({request: 40})
    plan = served.plan
    assert plan is not None
    full, window = plan.write_locs[Space.FULL], plan.window_locs[8]
    assert full.shape == window.shape
    assert int(window.max()) < pool.window_slots[8] + pool.page_size
    # The last 7 keys stay, in whole pages: positions 32 .. 39.
    assert sum(pool.is_mapped(8, p) for p in request.pages) == 2
    for _ in range(60):
        served.step({request: 1}, mode="decode")
    assert sum(pool.is_mapped(8, p) for p in request.pages) <= 3
    served.finish(request)
    assert allocator.window_free(8) == pool.window_slots[8] // pool.page_size
    assert not bool((pool.full_to_window[8][pool.page_size :] >= 0).any())


def test_a_window_pool_may_be_of_some_sizes_only() -> None:
    import anyattn

    specs = [spec(None), spec(4), spec(9)]
    decision = anyattn.select(specs, dtype=torch.float32, device="cpu", page_size=4)
    pool = anyattn.kv.create_pool(decision, num_slots=64, window_slots={4: 16})
    assert pool.slot_map(1) is not None
    assert pool.slot_map(2) is None
    table = anyattn.kv.RequestTable(max_requests=2, max_context=32)
    backend = anyattn.create_backend(decision, pool, table)
    spaces = {g.window: g.space for g in backend.config.groups.table_groups}
    assert spaces == {None: Space.FULL, 4: Space.WINDOW, 9: Space.FULL}
