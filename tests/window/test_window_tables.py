"""Tables of window groups against `req_to_token` and the map, read by hand: trimmed, then translated once."""

from __future__ import annotations

import random

import pytest
import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import GroupSet, Space, TableGroup
from anyattn.core.kv import RequestTable, WindowAllocator, WindowPool
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Table, TableForm, TableKind
from anyattn.core.spec import AttentionSpec

PAGE, CONTEXT, ROWS = 4, 64, 4
FORMS = [
    TableForm(TableKind.TOKEN_CSR, index_slack=5),
    TableForm(TableKind.PAGE_CSR, kernel_page=4, index_dtype=torch.int64),
    TableForm(TableKind.PAGE_CSR, kernel_page=2, fill=-1),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=4, fill=-1, width_multiple=4),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=2, fill=1),
]


def listed(table: Table, index: int) -> list[int]:
    """Entries of one request."""
    if table.form.kind is TableKind.BLOCK_TABLE:
        count = -(-int(table.kv_lens[index]) // table.form.kernel_page)
        return table.blocks[index, :count].tolist()
    indptr, indices = table.csr
    return indices[int(indptr[index]) : int(indptr[index + 1])].tolist()


def unused(table: Table) -> set[int]:
    """Values of the cells behind every request."""
    if table.form.kind is TableKind.BLOCK_TABLE:
        counts = [-(-int(n) // table.form.kernel_page) for n in table.kv_lens]
        return {int(x) for row, n in zip(table.blocks, counts, strict=True) for x in row[n:]}
    indptr, indices = table.csr
    return {int(x) for x in indices[int(indptr[-1]) :]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.kind.value}-{f.kernel_page}-fill{f.fill}")
def test_trimmed_first_translated_after_exactly_once(form: TableForm, seed: int) -> None:
    rng, window = random.Random(seed), 7
    specs = [
        AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=w) for w in (None, window)
    ]
    pool = WindowPool(
        specs, num_slots=ROWS * CONTEXT, window_slots=ROWS * CONTEXT, page_size=PAGE, kv_dtype=torch.float32,
        dtype=torch.float32,
    )  # fmt: skip
    allocator = WindowAllocator(pool, seed=seed)
    table = RequestTable(max_requests=ROWS, max_context=CONTEXT)
    groups = GroupSet.from_specs(specs, pool.full_to_window)
    compiler = MetadataCompiler(groups, form, pool, table, owner=1)
    prefix = [rng.randrange(0, 40) for _ in range(3)]
    extend = [rng.randrange(1, 20) for _ in range(3)]
    rows, loc, slots = rng.sample(range(ROWS), 3), [], {}
    for row, old, new in zip(rows, prefix, extend, strict=True):
        pages = allocator.allocate(-(-(old + new) // PAGE))
        allocator.cover(pages, 0, old + new)
        allocator.evict(pages, old)
        slots[row] = [p * PAGE + t for p in pages for t in range(PAGE)]
        table.req_to_token[row, : len(slots[row])] = torch.tensor(slots[row], dtype=torch.int32)
        loc += slots[row][old : old + new]
    plan = compiler.prepare(ForwardBatch.extend(rows, prefix, extend, loc))
    compiler.fill(plan)
    compiler.check(plan)
    slot_map = pool.full_to_window[window].tolist()
    assert plan.window_locs[window].tolist() == [slot_map[s] for s in loc]
    own = plan.tables[TableGroup(Space.WINDOW, window)]
    full = plan.tables[TableGroup()]
    step = form.kernel_page
    for index, (row, old, new) in enumerate(zip(rows, prefix, extend, strict=True)):
        first = max(0, old - window + 1) // step * step
        want = [slot_map[slots[row][p]] // step for p in range(first, old + new, step)]
        assert int(own.kv_start[index]) == first
        assert listed(own, index) == want
        assert min(want) > 0
        assert listed(full, index) == [slots[row][p] // step for p in range(0, old + new, step)]
    assert unused(own) <= {form.fill}


def test_the_group_of_a_layer_depends_on_the_pool() -> None:
    spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=7)
    one, dual = GroupSet.from_specs([spec]), GroupSet.from_specs([spec], {7, 9})
    assert one.table_groups == (TableGroup(Space.FULL, 7),)
    assert dual.table_groups == (TableGroup(Space.WINDOW, 7),)
    assert dual.locate(one.plan_groups[0]) == dual.plan_groups[0]
    assert dual.windows == {7}
