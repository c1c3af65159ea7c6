"""Virtual ids over physical pools: every step against the oracle, and what must be impossible."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.groups import Space, TableGroup
from anyattn.core.kv import UnifiedPool, VirtualIds, VirtualTable, WindowAllocator, bind_and_verify_backends
from anyattn.core.spec import AttentionKind
from anyattn.errors import BackendBuildError, BatchError, PoolError
from anyattn.testing.mode_runs import MODE_RUNS
from anyattn.testing.window_runs import RUNS, spec
from anyattn.testing.windows import Served

PLACES = [
    ("torch_native", "cpu"),
    pytest.param(
        ("triton", "cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
    ),
]


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("run", ["chunks", "several_sizes", "trees"])
@pytest.mark.parametrize("place", PLACES, ids=lambda p: p[0])
def test_every_step_agrees_with_the_oracle(place: tuple[str, str], run: str, dual: bool) -> None:
    error, served = RUNS[run](backend=place[0], device=place[1], dual=dual, virtual=True)
    assert error < 2e-5
    assert isinstance(served.pool, UnifiedPool)
    assert bool(served.pool.full_to_window) is dual


def test_split_prefill_and_address_stable_buffers() -> None:
    assert MODE_RUNS["split_prefill"](virtual=True) < 2e-5
    error, _ = RUNS["chunks"](virtual=True, buffers=True)
    assert error < 2e-5


def served(**options: int) -> tuple[Served, UnifiedPool]:
    made = Served([spec(None), spec(8)], virtual=True, max_context=64, **options)
    assert isinstance(made.pool, UnifiedPool)
    return made, made.pool


def test_virtual_and_physical_numbers_differ_and_each_is_translated_once() -> None:
    made, pool = served(evict=False)
    request = made.admit()
    made.step({request: 13})
    plan = made.plan
    assert plan is not None
    listed = made.table.req_to_token[request.row, :13].long()
    assert plan.listed_loc is not None
    assert torch.equal(plan.listed_loc, listed)
    for space, layer in ((TableGroup(), 0), (TableGroup(Space.WINDOW, 8), 1)):
        once = pool.slot_map(layer)[listed].long()
        assert not torch.equal(once, listed)
        loc = plan.write_loc(space)
        assert loc is not None
        assert torch.equal(loc, once)
        indptr, indices = plan.tables[space].csr
        assert torch.equal(indices[: int(indptr[-1])].long(), once)
    _, pages = pool.num_slots, made.allocator
    assert isinstance(pages, WindowAllocator)
    assert pages.num_pages == 3 * pool.num_slots // pool.page_size


def test_virtual_pages_may_outnumber_physical_ones() -> None:
    made, pool = served()
    allocator = made.allocator
    assert isinstance(allocator, WindowAllocator)
    pages = allocator.allocate(pool.num_slots // pool.page_size + 1)
    with pytest.raises(PoolError, match="not enough free pages in the full pool"):
        allocator.cover(pages, 0, len(pages) * pool.page_size)


def test_raw_numbers_are_no_ids_and_ids_are_no_slots() -> None:
    made, pool = served()
    request = made.admit()
    made.step({request: 9})
    ids = VirtualIds(made.table.req_to_token[request.row, :9].long())
    own = pool.to_own(0, ids)
    with pytest.raises(PoolError, match="translated once"):
        pool.to_own(0, own)
    with pytest.raises(TypeError):
        pool.gather(0, ids)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.write(0, ids, torch.zeros(9, 2, 16), torch.zeros(9, 2, 16))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ids // 4  # type: ignore[operator]
    with pytest.raises(BatchError, match="out_cache_loc has physical ids"):
        made.backend.init_forward_metadata(anyattn.ForwardBatch.decode([request.row], [10], [40]))
    plain = Served([spec(None)])
    with pytest.raises(BatchError, match="out_cache_loc has virtual ids"):
        plain.backend.init_forward_metadata(
            anyattn.ForwardBatch.decode([0], [1], VirtualIds(torch.tensor([8])))
        )


def test_table_and_pool_speak_of_the_same_ids() -> None:
    made, pool = served()
    raw = anyattn.kv.RequestTable(max_requests=4, max_context=64)
    with pytest.raises(PoolError, match="different ids"):
        anyattn.create_backend(made.decision, pool, raw)
    plain = Served([spec(None)])
    with pytest.raises(PoolError, match="different ids"):
        anyattn.create_backend(plain.decision, plain.pool, VirtualTable(max_requests=4, max_context=64))
    table = VirtualTable(max_requests=2, max_context=8)
    table.assign(1, 3, VirtualIds(torch.tensor([40, 41])))
    assert table.req_to_token[1].tolist() == [0, 0, 0, 40, 41, 0, 0, 0]
    with pytest.raises(PoolError, match="virtual ids"):
        table.assign(1, 3, torch.tensor([40]))  # type: ignore[arg-type]
    with pytest.raises(PoolError, match="positions"):
        table.assign(1, 7, VirtualIds(torch.tensor([40, 41])))


@pytest.mark.parametrize("virtual", [True, False])
def test_backends_whose_reads_nobody_or_two_would_translate(virtual: bool) -> None:
    made = Served([spec(None), spec(8)], virtual=virtual)
    made.backend.translates_reads = True  # type: ignore[misc]
    with pytest.raises(BackendBuildError, match="twice"):
        bind_and_verify_backends([made.backend], made.pool, made.table)  # type: ignore[list-item]
    plain = Served([spec(None), spec(8)], dual=False)
    plain.backend.translates_reads = True  # type: ignore[misc]
    bind_and_verify_backends([plain.backend], plain.pool, plain.table)  # type: ignore[list-item]


def test_sizes_and_layers_that_cannot_be() -> None:
    made, _ = served()
    for num_ids in (0, 6):
        with pytest.raises(PoolError, match="virtual ids must be whole pages"):
            anyattn.kv.create_pool(made.decision, num_slots=64, num_ids=num_ids)
    cross = anyattn.select([spec(None, kind=AttentionKind.CROSS)], dtype=torch.float32, device="cpu")
    with pytest.raises(PoolError, match="cross-attention"):
        anyattn.kv.create_pool(cross, num_slots=64, num_ids=64)


def test_an_id_with_nothing_behind_it_is_named() -> None:
    made, pool = served()
    request, other = made.admit(), made.admit()
    made.step({request: 9, other: 9})
    pool.unmap_pages(None, [request.pages[0]])
    with pytest.raises(BatchError, match="was never mapped in the full pool"):
        made.step({request: 1, other: 1}, mode="decode")
