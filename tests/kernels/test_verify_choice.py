"""Which steps of a few query tokens have their keys cut, and into what; on the choices alone."""

import pytest

from anyattn.kernels.triton.configs import amd, nvidia
from anyattn.kernels.triton.configs.choose_verify import Verify, choose_few, choose_verify, verify_row

ARCHITECTURES = sorted({name for row in (*nvidia.EXTEND, *amd.EXTEND) for name in row.architectures})


def chosen(
    batch: int, new: int, context: int = 8192, *, group: int = 4, arch: str = "sm90", even: bool = False,
    dim: int = 128, run: int = 16,
) -> Verify | None:  # fmt: skip
    return choose_verify(batch, 8, group, new, context, dim, 2, arch, 132, even=even, run=run)


@pytest.mark.parametrize(
    ("batch", "new", "block", "blocks"), [(1, 16, 64, 1), (16, 8, 32, 1), (32, 4, 16, 1), (1, 128, 64, 8)]
)
def test_few_row_blocks_are_cut(batch: int, new: int, block: int, blocks: int) -> None:
    for even in (False, True):
        got = chosen(batch, new, even=even)
        assert got is not None
        assert (got.block_m, got.row_blocks, got.max_new) == (block, blocks, new)
        assert got.keys.split is not (even and batch == 16)
        slots = 132 if batch in (1, 16) and new < 128 else 2 * 132
        assert slots // 2 < got.keys.num_ranges * 8 * blocks <= slots, "two programs an SM, one of few tiles"
        assert (got.keys.parts > 1) is (even and 2 * batch * 8 * blocks <= slots)


@pytest.mark.parametrize(
    ("batch", "new", "context"), [(64, 4, 2048), (1, 200, 8192), (1, 4, 512), (8, 64, 8192), (40, 4, 4096)]
)
def test_other_steps_are_extended(batch: int, new: int, context: int) -> None:
    """The chip is full, rows are many, keys are few."""
    assert chosen(batch, new, context) is None


def test_where_programs_hold_whole_requests_tiles_are_wide() -> None:
    """And nothing is merged, if lengths are known to be equal."""
    for even, context, wide in ((False, 8192, True), (True, 8192, True), (False, 2048, False)):
        got = chosen(16, 8, context, even=even)
        assert got is not None
        assert (got.keys.block_n == 128) is wide
        assert (got.keys.parts, got.keys.split) == ((1, False) if even else (0, True))
        assert not wide or got.keys.num_ranges == 16
    for batch, group in ((14, 4), (17, 4), (16, 2)):  # idle SMs; more requests; fewer rows
        got = chosen(batch, 8, group=group)
        assert got is not None
        assert got.keys.block_n == 64


def test_few_rows_among_many_are_ranges() -> None:
    got = choose_few(128, 8, 4, 8192, 128, 2, "sm90", 132)
    assert got is not None
    assert (got.block_m, got.row_blocks, got.max_new, got.keys.num_ranges) == (16, 1, 4, 33)
    assert (got.keys.parts, got.keys.split) == (0, True)
    assert choose_few(128, 8, 32, 8192, 128, 2, "sm90", 132) is None, "rows of one token are more"
    short = choose_few(2, 8, 4, 64, 128, 2, "sm90", 132)
    assert short is not None
    assert short.keys.num_ranges == 2


def test_programs_of_few_tiles_have_an_sm_alone() -> None:
    """The bound of 8,208 keys is 16k."""
    for context, slots in ((8192, 132), (16_384, 132), (32_768, 264)):
        got = chosen(1, 16, context, even=True)
        assert got is not None
        assert slots - 8 < 8 * got.keys.num_ranges <= slots


def test_a_graph_deals_ranges_out() -> None:
    got = chosen(12, 8)
    assert got is not None
    assert (got.keys.num_ranges, got.keys.parts, got.keys.overlap) == (33, 0, 0)
    short = chosen(1, 16, 2048, even=True)
    assert short is not None
    assert short.keys.overlap == 2, "programs of a few tiles let what follows start early"
    assert short.keys.parts == 16, "two tiles at least"


@pytest.mark.parametrize(("run", "unit"), [(1, 16), (16, 16), (32, 32), (48, 16), (64, 64), (128, 128)])
@pytest.mark.parametrize(("new", "tile"), [(4, 128), (16, 64)])
def test_equal_parts_are_of_less_than_whole_tiles(run: int, unit: int, new: int, tile: int) -> None:
    """A table entry is not cut: the kernel reads one for as many keys."""
    got = chosen(1, new, even=True, run=run)
    assert got is not None
    assert (got.keys.parts, got.keys.unit, got.keys.block_n) == (16, unit if unit < tile else 0, tile)
    for even, batch in ((False, 1), (True, 16)):  # ranges; whole requests
        other = chosen(batch, 8, even=even, run=run)
        assert other is not None
        assert other.keys.unit == 0


@pytest.mark.parametrize(("context", "early"), [(8193, 2), (8208, 2), (9152, 2), (9153, 0), (16_384, 0)])
def test_the_bound_itself_says_whether_programs_are_short(context: int, early: int) -> None:
    """Not the power of two that decides the rest: less than nine tiles, 16 programs. Equal parts start early
    at any length."""
    got = chosen(1, 16, context)
    assert got is not None
    assert (got.keys.num_ranges, got.keys.overlap) == (16, early)
    assert got is chosen(1, 16, 8208 if early else 9300), "the same object for the same choice"
    even = chosen(1, 16, context, even=True)
    assert even is not None
    assert (even.keys.num_ranges, even.keys.overlap) == (16, 2)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_chip_has_a_tile(arch: str, dim: int) -> None:
    got = chosen(1, 4, even=True, arch=arch, dim=dim)
    assert got is not None
    assert got.block_m * got.row_blocks >= 16
    assert got.keys.overlap == 0 or arch == "sm90"
    if arch != "sm90":
        assert got.keys.parts * 8 <= 132
        assert chosen(17, 4, arch=arch, dim=dim) is None


def test_cells_of_every_column_leave_room_for_fewer_rows() -> None:
    got = choose_verify(1, 8, 4, 16, 8192, 128, 2, "sm90", 132, masked=True)
    assert got is not None
    assert (got.block_m, got.row_blocks, got.keys.num_stages) == (32, 2, 3)
    assert choose_verify(1, 8, 4, 200, 8192, 128, 2, "sm90", 132, masked=True) is None


def test_larger_heads_and_other_chips_have_small_blocks() -> None:
    assert verify_row("sm90", 256, 2, 64).block_m == 16
    assert verify_row("sm90", 128, 4, 64).block_m == 16, "float32"
    assert verify_row("unknown", 64, 2, 64).block_m == 16
    assert verify_row("sm90", 128, 2, 10_000).max_rows == 512
