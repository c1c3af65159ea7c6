"""The compiler's tables against a brute-force reading of `req_to_token`, in every form."""

import itertools
import random

import pytest
import torch

from anyattn.core.batch import ForwardBatch, UpperBound
from anyattn.core.groups import GroupSet, TableGroup
from anyattn.core.kv import MHAPool, RequestTable
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import AttentionSpec, Limits

LIMITS = Limits(max_requests=6, max_tokens=256, max_context=96)


def compiler(form: TableForm, pool_page: int, windows: list[int | None]) -> MetadataCompiler:
    specs = [AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=w) for w in windows]
    pool = MHAPool(specs, num_slots=64 * 12, page_size=pool_page, kv_dtype=torch.float32, dtype=torch.float32)
    table = RequestTable(max_requests=LIMITS.max_requests, max_context=LIMITS.max_context)
    return MetadataCompiler(GroupSet.from_specs(specs), form, pool, table, owner=1)


def random_batch(made: MetadataCompiler, rng: random.Random) -> tuple[ForwardBatch, dict[int, list[int]]]:
    """Requests with shuffled pages in shuffled rows; returns the slots of every row too."""
    page, table = made.pool.page_size, made.table
    pages = rng.sample(range(1, made.pool.num_pages), made.pool.num_pages - 1)
    count = rng.randint(1, 4)
    rows = rng.sample(range(table.max_requests), count)
    slots: dict[int, list[int]] = {}
    prefix, extend, loc = [], [], []
    for row in rows:
        total = rng.choice([1, page, page + 1, max(1, page - 1), rng.randint(1, LIMITS.max_context // 2)])
        new = rng.choice([1, total, rng.randint(1, total)])
        own = [pages.pop() for _ in range(-(-total // page))]
        slots[row] = [p * page + i for p in own for i in range(page)][:total]
        table.req_to_token[row, :total] = torch.tensor(slots[row], dtype=torch.int32)
        prefix.append(total - new)
        extend.append(new)
        loc += slots[row][total - new :]
    return ForwardBatch.extend(rows, prefix, extend, loc), slots


def expected_rows(
    batch: ForwardBatch, slots: dict[int, list[int]], window: int | None, page: int
) -> tuple[list[list[int]], list[int]]:
    """Pages (or slots) that each request's table must list, and where they start."""
    listed, starts = [], []
    for row, seq, ext in zip(
        batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True
    ):
        first = 0 if window is None else max(0, seq - ext - window + 1)
        first -= first % page
        starts.append(first)
        listed.append([slots[row][p] // page for p in range(first, seq, page)])
    return listed, starts


def assert_table(
    plan: Plan, group: TableGroup, rows: list[list[int]], starts: list[int], form: TableForm
) -> None:
    table = plan.tables[group]
    assert table.kv_start.tolist() == starts
    assert table.kv_lens.tolist() == [int(s) - f for s, f in zip(plan.seq_lens, starts, strict=True)]
    if form.kind is TableKind.REQUEST_TABLE:
        assert table.indptr is None
        assert table.block_table is None
        return
    if form.kind is TableKind.BLOCK_TABLE:
        blocks = table.blocks.tolist()
        assert len(blocks[0]) % form.width_multiple == 0
        for got, want in zip(blocks, rows, strict=True):
            assert got[: len(want)] == want
            assert set(got[len(want) :]) <= {form.fill}
        return
    indptr, indices = table.csr
    assert indptr.tolist() == [0, *itertools.accumulate(len(r) for r in rows)]
    flat = [x for r in rows for x in r]
    assert indices.tolist()[: len(flat)] == flat
    assert set(indices.tolist()[len(flat) :]) <= {form.fill}
    assert indices.shape[0] >= len(flat) + form.index_slack
    page = form.kernel_page
    assert table.last_page_len is not None
    lens = [int(n) - (len(r) - 1) * page for n, r in zip(table.kv_lens, rows, strict=True)]
    assert table.last_page_len.tolist() == lens


FORMS = [
    (TableForm(TableKind.TOKEN_CSR, index_dtype=torch.int64), 1),
    (TableForm(TableKind.TOKEN_CSR, index_slack=5, fill=0), 16),
    (TableForm(TableKind.PAGE_CSR, kernel_page=4), 16),
    (TableForm(TableKind.PAGE_CSR, kernel_page=16), 16),
    (TableForm(TableKind.BLOCK_TABLE, kernel_page=16, fill=-1, width_multiple=4), 16),
    (TableForm(TableKind.BLOCK_TABLE, kernel_page=1), 4),
    (TableForm(TableKind.BLOCK_TABLE, kernel_page=64, fill=1), 64),
    (TableForm(TableKind.REQUEST_TABLE), 16),
]


@pytest.mark.parametrize(("form", "pool_page"), FORMS, ids=lambda x: str(getattr(x, "kind", x)))
@pytest.mark.parametrize("mode", ["exact", "bound", "buffers"])
def test_tables_equal_brute_force(form: TableForm, pool_page: int, mode: str) -> None:
    rng = random.Random(f"{form.kind.value} {form.kernel_page} {mode}")
    windows: list[int | None] = [None, 1, 7, 16, 17]
    made = compiler(form, pool_page, windows)
    buffers = StepBuffers(LIMITS, form, made.device) if mode == "buffers" else None
    for _ in range(15):
        batch, slots = random_batch(made, rng)
        if mode != "exact":
            batch = batch.view(host_lens=UpperBound(LIMITS.max_context, LIMITS.max_context))
        plan = made.prepare(batch, buffers)
        made.fill(plan)
        made.check(plan)
        extends = batch.extend_seq_lens.tolist()
        assert plan.query_offsets.tolist() == [0, *itertools.accumulate(extends)]
        positions = [
            p for s, e in zip(batch.seq_lens.tolist(), extends, strict=True) for p in range(s - e, s)
        ]
        assert plan.positions.tolist() == positions
        for group, window in zip(plan.tables, windows, strict=True):
            rows, starts = expected_rows(batch, slots, window, form.kernel_page)
            assert_table(plan, group, rows, starts, form)


def test_two_plans_share_nothing() -> None:
    form = TableForm(TableKind.TOKEN_CSR)
    made = compiler(form, 4, [None])
    rng = random.Random(5)
    first, slots = random_batch(made, rng)
    plan = made.prepare(first)
    made.fill(plan)
    rows, starts = expected_rows(first, slots, None, 1)
    made.table.req_to_token.zero_()
    second, _ = random_batch(made, rng)
    other = made.prepare(second)
    made.fill(other)
    assert_table(plan, next(iter(plan.tables)), rows, starts, form)


def test_buffers_keep_their_addresses() -> None:
    form = TableForm(TableKind.BLOCK_TABLE, kernel_page=4)
    made = compiler(form, 4, [None, 3])
    buffers = StepBuffers(LIMITS, form, made.device)
    rng = random.Random(1)
    seen = set()
    for _ in range(5):
        batch, _ = random_batch(made, rng)
        plan = made.prepare(batch, buffers)
        made.fill(plan)
        seen.add((plan.positions.data_ptr(), *(t.blocks.data_ptr() for t in plan.tables.values())))
    assert len(seen) == 1
    assert buffers.nbytes() > 0


def test_empty_extend_length_is_legal() -> None:
    made = compiler(TableForm(TableKind.TOKEN_CSR), 4, [None])
    made.table.req_to_token[0, :5] = torch.arange(4, 9, dtype=torch.int32)
    made.table.req_to_token[1, :3] = torch.arange(12, 15, dtype=torch.int32)
    plan = made.prepare(ForwardBatch.extend([0, 1], [5, 0], [0, 3], [12, 13, 14]))
    made.fill(plan)
    assert plan.query_offsets.tolist() == [0, 0, 3]
    assert plan.positions.tolist() == [0, 1, 2]
    (table,) = plan.tables.values()
    assert table.csr[1].tolist() == [4, 5, 6, 7, 8, 12, 13, 14]


def test_padding_rows_name_the_zero_row() -> None:
    made = compiler(TableForm(TableKind.BLOCK_TABLE, kernel_page=4), 4, [None])
    made.table.req_to_token[2, :5] = torch.arange(8, 13, dtype=torch.int32)
    batch = ForwardBatch.decode([2, made.table.padding_row], [5, 1], [12, 0], num_padding_requests=1).view(
        num_padding_tokens=1
    )
    plan = made.prepare(batch)
    made.fill(plan)
    made.check(plan)
    (table,) = plan.tables.values()
    assert table.blocks.tolist() == [[2, 3], [0, 0]]
