"""The fused metadata kernel against `MetadataCompiler.fill`, bit for bit, in every form."""

import random

import pytest
import torch
from metadata_cases import FORMS, SMALL, assert_same, compiler, fill_table, random_batch, spec

from anyattn.core.batch import ForwardBatch, UpperBound
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import TableForm, TableKind
from anyattn.core.spec import AttentionKind
from anyattn.kernels.triton.launch import set_hook
from anyattn.kernels.triton.metadata_launch import FusedFiller

FULL_AND_WINDOW = [spec(), spec(7)]


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
        batch = random_batch(made.table, rng, count, exact=exact)
        assert_same(made, batch, small(made), None if exact else SMALL)


@pytest.mark.parametrize("window", [1, 16, 17, 1 << 31])
def test_windows_around_pages(window: int) -> None:
    rng = random.Random(window)
    made = compiler(TableForm(TableKind.PAGE_CSR, kernel_page=16), [spec(window)])
    fill_table(made.table, rng)
    assert_same(made, random_batch(made.table, rng, 4, exact=True), small(made))


@pytest.mark.parametrize("form", [FORMS[2], FORMS[4]], ids=lambda f: f.kind.value)
def test_encoder_group_has_its_own_source_and_lengths(form: TableForm) -> None:
    rng = random.Random(3)
    made = compiler(form, [spec(), spec(kind=AttentionKind.CROSS), spec(9)])
    fill_table(made.table, rng)
    plan = assert_same(made, random_batch(made.table, rng, 3, exact=True, encoder=True), small(made))
    assert plan.encoder_lens is not None
    assert list(plan.tables.values())[1].kv_lens.tolist() == plan.encoder_lens.tolist()


def test_more_groups_than_slots_take_two_launches() -> None:
    rng = random.Random(4)
    made = compiler(FORMS[1], [spec(w) for w in (None, 1, 2, 3, 5)])
    fill_table(made.table, rng)
    grids: list[tuple[int, ...]] = []
    previous = set_hook(lambda kernel, grid, *_: bool(grids.append(grid)))
    try:
        assert_same(made, random_batch(made.table, rng, 2, exact=True), small(made))
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
            bound = UpperBound(SMALL.max_context)
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
    batch = batch.view(seq_lens=torch.tensor([9, 0, 0]), host_lens=UpperBound(SMALL.max_context))
    plan = assert_same(made, batch, small(made))
    assert plan.prefix_lens.tolist() == [8, -1, -1]


def test_lengths_beyond_the_table_read_its_last_column() -> None:
    """Not legal, but it must not read foreign memory either."""
    rng = random.Random(8)
    made = compiler(FORMS[1], [spec()])
    fill_table(made.table, rng)
    beyond = torch.tensor([SMALL.max_context + 9, 5])
    batch = ForwardBatch.decode([0, 1], [9, 5], [20, 21]).view(seq_lens=beyond, host_lens=UpperBound(80))
    (table,) = assert_same(made, batch, small(made)).tables.values()
    assert table.csr[1][63:73].unique().numel() == 1


def test_no_tokens_at_all() -> None:
    made = compiler(FORMS[1], FULL_AND_WINDOW)
    batch = ForwardBatch.extend([0, 1], [4, 0], [0, 0], torch.empty(0, dtype=torch.int64))
    assert assert_same(made, batch, small(made)).positions.shape == (0,)


def test_shipped_sizes_and_no_groups() -> None:
    rng = random.Random(7)
    for specs in (FULL_AND_WINDOW, [spec(kind=AttentionKind.ENCODER_ONLY)]):
        made = compiler(FORMS[3], specs)
        fill_table(made.table, rng)
        assert_same(made, random_batch(made.table, rng, 3, exact=True), FusedFiller(made.table))
