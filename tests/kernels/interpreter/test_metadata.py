"""The fused metadata kernel against `MetadataCompiler.fill`, bit for bit, in every form."""

import random
from collections.abc import Iterator

import pytest
import torch

from anyattn.core.batch import ForwardBatch, UpperBound
from anyattn.core.groups import GroupSet
from anyattn.core.kv import MHAPool, RequestTable
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import AttentionKind, AttentionSpec, Limits
from anyattn.kernels.triton.launch import set_hook
from anyattn.kernels.triton.metadata_launch import FusedFiller

LIMITS = Limits(max_requests=6, max_tokens=256, max_context=64)
MAX_ENCODER = 40
UNWRITTEN = -77

FORMS = [
    TableForm(TableKind.TOKEN_CSR, index_dtype=torch.int64),
    TableForm(TableKind.TOKEN_CSR, index_slack=21, fill=3),
    TableForm(TableKind.PAGE_CSR, kernel_page=4, index_slack=1),
    TableForm(TableKind.PAGE_CSR, kernel_page=16, fill=-1),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=16, fill=-1, width_multiple=4),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=1, fill=5, index_dtype=torch.int64),
    TableForm(TableKind.REQUEST_TABLE),
]


def compiler(form: TableForm, specs: list[AttentionSpec]) -> MetadataCompiler:
    pool = MHAPool(specs, num_slots=64 * 16, page_size=16, kv_dtype=torch.float32, dtype=torch.float32)
    table = RequestTable(
        max_requests=LIMITS.max_requests, max_context=LIMITS.max_context, max_encoder=MAX_ENCODER
    )
    made = MetadataCompiler(GroupSet.from_specs(specs), form, pool, table, owner=1)
    made.checks = "off"  # what is compared is arithmetic: the slots are arbitrary numbers
    return made


def spec(window: int | None = None, kind: AttentionKind = AttentionKind.CAUSAL) -> AttentionSpec:
    return AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=window, kind=kind)


FULL_AND_WINDOW = [spec(), spec(7)]


def fill_table(table: RequestTable, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    assert table.encoder_to_token is not None
    for cells in (table.req_to_token, table.encoder_to_token):
        cells.copy_(torch.randint(-40, 1 << 20, cells.shape, generator=generator))


def lengths(rng: random.Random, count: int) -> tuple[list[int], list[int]]:
    """Prefix and extend lengths around page and chunk edges, empty ones among them."""
    seq = [rng.choice([0, 1, 15, 16, 17, 33, rng.randint(1, 40), LIMITS.max_context]) for _ in range(count)]
    extend = [rng.choice([min(1, n), n, rng.randint(0, n)]) for n in seq]
    return [s - e for s, e in zip(seq, extend, strict=True)], extend


def random_batch(rng: random.Random, count: int, *, exact: bool, encoder: bool = False) -> ForwardBatch:
    prefix, extend = lengths(rng, count)
    padding = rng.choice([0, 3])
    rows = rng.sample(range(LIMITS.max_requests + 1), count)
    batch = ForwardBatch.extend(
        rows,
        prefix,
        extend,
        list(range(sum(extend) + padding)),
        encoder_lens=[rng.randint(0, MAX_ENCODER) for _ in rows] if encoder else None,
        num_padding_tokens=padding,
    )
    return batch if exact else batch.view(host_lens=UpperBound(LIMITS.max_context, LIMITS.max_context))


def outputs(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that `fill` writes."""
    yield "prefix_lens", plan.prefix_lens
    yield "query_offsets", plan.query_offsets
    yield "positions", plan.positions
    for index, table in enumerate(plan.tables.values()):
        for name in ("kv_start", "kv_lens", "indptr", "indices", "last_page_len", "block_table"):
            tensor = getattr(table, name)
            if tensor is not None:
                yield f"{name}.{index}", tensor


def filled(made: MetadataCompiler, batch: ForwardBatch, fused: FusedFiller | None) -> Plan:
    """A plan whose every cell was poisoned before `fill`."""
    buffers = StepBuffers(LIMITS, made.form, made.device)
    plan = made.prepare(batch, buffers)
    for name, tensor in outputs(plan):
        if name != "positions" or batch.positions is None:
            tensor.fill_(UNWRITTEN)
    made.filler = fused
    made.fill(plan)
    return plan


def assert_same(made: MetadataCompiler, batch: ForwardBatch, fused: FusedFiller) -> Plan:
    want, got = filled(made, batch, None), filled(made, batch, fused)
    for (name, a), (_, b) in zip(outputs(want), outputs(got), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), f"{name}\nwant {a.tolist()}\ngot  {b.tolist()}"
    return got


def small(made: MetadataCompiler, *, programs: int = 8) -> FusedFiller:
    """Chunks and sums far below the test's lengths, so that every loop runs more than once."""
    return FusedFiller(made.table, chunk=16, block_b=2, programs=programs)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.kind.value}-{f.kernel_page}")
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "bound"])
def test_equal_in_every_form(form: TableForm, exact: bool) -> None:
    rng = random.Random(f"{form} {exact}")
    made = compiler(form, FULL_AND_WINDOW)
    for count in (1, 2, 3, 4, 5):
        fill_table(made.table, rng)
        assert_same(made, random_batch(rng, count, exact=exact), small(made))


@pytest.mark.parametrize("window", [1, 16, 17, 1 << 31])
def test_windows_around_pages(window: int) -> None:
    rng = random.Random(window)
    made = compiler(TableForm(TableKind.PAGE_CSR, kernel_page=16), [spec(window)])
    fill_table(made.table, rng)
    assert_same(made, random_batch(rng, 4, exact=True), small(made))


@pytest.mark.parametrize("form", [FORMS[2], FORMS[4]], ids=lambda f: f.kind.value)
def test_encoder_group_has_its_own_source_and_lengths(form: TableForm) -> None:
    rng = random.Random(3)
    made = compiler(form, [spec(), spec(kind=AttentionKind.CROSS), spec(9)])
    fill_table(made.table, rng)
    plan = assert_same(made, random_batch(rng, 3, exact=True, encoder=True), small(made))
    assert plan.encoder_lens is not None
    assert list(plan.tables.values())[1].kv_lens.tolist() == plan.encoder_lens.tolist()


def test_more_groups_than_slots_take_two_launches() -> None:
    rng = random.Random(4)
    made = compiler(FORMS[1], [spec(w) for w in (None, 1, 2, 3, 5)])
    fill_table(made.table, rng)
    grids: list[tuple[int, ...]] = []
    previous = set_hook(lambda kernel, grid, *_: bool(grids.append(grid)))
    try:
        assert_same(made, random_batch(rng, 2, exact=True), small(made))
    finally:
        set_hook(previous)
    assert [grid[1] for grid in grids] == [1 + 4, 1 + 1]


def test_one_launch_whose_grid_the_lengths_dont_change() -> None:
    """A captured launch serves every batch of its shape."""
    rng = random.Random(5)
    made = compiler(FORMS[0], FULL_AND_WINDOW)
    grids: list[tuple[int, ...]] = []
    previous = set_hook(lambda kernel, grid, *_: bool(grids.append(grid)))
    try:
        for seq in ([5, 64, 1], [2, 3, 60]):
            fill_table(made.table, rng)
            bound = UpperBound(LIMITS.max_context)
            assert_same(
                made, ForwardBatch.decode([0, 1, 2], seq, [20, 21, 22]).view(host_lens=bound), small(made)
            )
    finally:
        set_hook(previous)
    assert len(grids) == 2
    assert grids[0] == grids[1]


def test_given_positions_stay() -> None:
    made = compiler(FORMS[6], [spec()])
    batch = ForwardBatch.extend([1, 0], [4, 0], [2, 1], [20, 21, 22], positions=[9, 8, 7])
    assert assert_same(made, batch, small(made)).positions.tolist() == [9, 8, 7]


def test_padded_requests_without_tokens() -> None:
    """A padded row whose length is the fill value 0 while it holds a query token: its prefix is -1."""
    rng = random.Random(6)
    made = compiler(FORMS[2], FULL_AND_WINDOW)
    fill_table(made.table, rng)
    row = made.table.padding_row
    batch = ForwardBatch.decode([2, row, row], [9, 1, 1], [20, 0, 0], num_padding_requests=2)
    batch = batch.view(seq_lens=torch.tensor([9, 0, 0]), host_lens=UpperBound(LIMITS.max_context))
    plan = assert_same(made, batch, small(made))
    assert plan.prefix_lens.tolist() == [8, -1, -1]


def test_shipped_sizes_and_no_groups() -> None:
    rng = random.Random(7)
    for specs in (FULL_AND_WINDOW, [spec(kind=AttentionKind.ENCODER_ONLY)]):
        made = compiler(FORMS[3], specs)
        fill_table(made.table, rng)
        assert_same(made, random_batch(rng, 3, exact=True), FusedFiller(made.table))
