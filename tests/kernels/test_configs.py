"""Tile tables: every architecture has rows of its own for everything that the catalog offers there."""

import itertools
import os

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")

from anyattn.catalog import architectures
from anyattn.kernels.triton.configs import amd, choose_decode, choose_extend, interpreter, nvidia
from anyattn.kernels.triton.configs.choose import (
    EVEN_RUN,
    EVEN_TILES,
    MIN_TILES,
    decode_row,
    extend_row,
    kernel_arch,
    num_units,
    power_of_two,
)

HEAD_SIZES = (16, 64, 80, 96, 112, 128, 192, 256)
CHIPS = tuple(name.partition(":")[2] for name in (*architectures.CUDA, *architectures.ROCM))
ITEM_SIZES = (2, 4)
ROWS = (1, 2, 16, 17, 64, 65, 512, 1 << 20, 1 << 24)


@pytest.mark.parametrize("arch", [*CHIPS, "sm87"])
@pytest.mark.parametrize("itemsize", ITEM_SIZES)
def test_no_known_chip_falls_back_to_the_interpreter(arch: str, itemsize: int) -> None:
    for dim in HEAD_SIZES:
        assert arch in decode_row(arch, dim, itemsize).architectures
        for rows in ROWS:
            assert arch in extend_row(arch, dim, itemsize, rows).architectures


def test_unknown_chips_get_the_smallest_tiles() -> None:
    assert decode_row("gfx1030", 128, 2) is interpreter.DECODE[-1]
    assert extend_row("gfx1030", 128, 2, 512) is interpreter.EXTEND[-1]
    assert choose_decode(1, 1, 1024, 64, 2, "sm999", 10).block_n == interpreter.DECODE[-1].wide.block_n


@pytest.mark.parametrize("arch", CHIPS)
def test_tiles_are_what_a_dot_takes(arch: str) -> None:
    """Powers of two, 16 keys and rows at least, a workgroup of at most 1024 threads."""
    wave = 64 if arch in ("gfx90a", "gfx942", "gfx950") else 32
    for dim, itemsize in itertools.product(HEAD_SIZES, ITEM_SIZES):
        row = decode_row(arch, dim, itemsize)
        tiles = [row.wide, row.narrow, *(extend_row(arch, dim, itemsize, rows).tile for rows in ROWS)]
        for tile in tiles:
            assert tile.block_n >= 16
            assert tile.block_n == power_of_two(tile.block_n)
            assert tile.num_warps in (1, 2, 4, 8, 16)
            assert tile.num_warps * wave <= 1024
            assert 1 <= tile.num_stages <= 4
            assert not arch.startswith("gfx") or tile.maxnreg is None  # an option of NVIDIA's compiler
        for rows in ROWS:
            block_m = choose_extend(rows, dim, itemsize, arch).block_m
            assert block_m >= 16
            assert block_m == power_of_two(block_m)


@pytest.mark.parametrize("arch", CHIPS)
def test_cuda_pipelines_its_loads(arch: str) -> None:
    """`cp.async` needs two stages."""
    if arch.startswith("sm"):
        for dim, itemsize in itertools.product(HEAD_SIZES, ITEM_SIZES):
            assert choose_decode(1, 1, 4096, dim, itemsize, arch, 100).num_stages >= 2
            assert choose_extend(512, dim, itemsize, arch).num_stages >= 2


@pytest.mark.parametrize("arch", [*CHIPS, "interpreter"])
@pytest.mark.parametrize("batch", [1, 7, 16, 17, 132, 133, 512])
def test_ranges_fill_the_chip(arch: str, batch: int) -> None:
    for units, length, dim, programs in itertools.product(
        (4, 132), (1, 16, 100, 8192, 131_072), (64, 256), (1, 7, 8, 32, 48, 100)
    ):
        got = choose_decode(batch, programs, length, dim, 2, arch, units)
        row = decode_row(arch, dim, 2)
        wanted = row.wide if batch * programs <= units else row.narrow
        slots = units if wanted is row.wide else row.programs_per_unit * units
        if row.walk is not None and row.walk_always:
            wanted, slots = row.walk, row.walk_per_unit * units
        tile = (wanted.block_n, wanted.num_warps, wanted.num_stages)
        assert (got.block_n, got.num_warps, got.num_stages) == tile
        tiles = -(-length // got.block_n)
        assert got.split == (tiles > (1 if wanted is row.wide else MIN_TILES))
        assert got.num_ranges == batch or got.split
        assert got.num_ranges <= batch * tiles
        if got.split and got.num_ranges < batch * tiles and programs <= slots // 4:
            filled = got.num_ranges * programs / slots
            assert filled / -(-filled // 1) > 0.85, "a last wave that is nearly empty"


def test_one_long_request_uses_every_unit() -> None:
    for even, longest in itertools.product((False, True), (8192, 131_072)):
        got = choose_decode(1, 8, longest, 128, 2, "sm90", 132, even=even)
        assert got.num_ranges == 132 // 8
        assert got.parts == (132 // 8 if even and longest == 8192 else 0)


@pytest.mark.parametrize(
    ("batch", "longest", "parts"),
    [
        (1, 16_384, 16),
        (2, 8192, 8),
        (4, 4096, 4),
        (16, 1024, 1),
        (17, 131_072, 1),
        (33, 8192, 1),
        (98, 8192, 1),
    ],
)
def test_even_requests_have_as_many_parts_as_there_is_room_for(batch: int, longest: int, parts: int) -> None:
    got = choose_decode(batch, 8, longest, 128, 2, "sm90", 132, even=True)
    assert (got.parts, got.split) == ((parts, True) if parts > 1 else (0, False))
    assert got.num_ranges == batch * parts


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942"])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_long_wide_parts_become_ranges(arch: str, batch: int) -> None:
    tile = decode_row(arch, 128, 2).wide.block_n
    longest = EVEN_TILES * 132 // (batch * 8) * tile
    assert choose_decode(batch, 8, longest, 128, 2, arch, 132, even=True).parts == 132 // (batch * 8)
    longer = choose_decode(batch, 8, longest + 1, 128, 2, arch, 132, even=True, run=EVEN_RUN - 1)
    assert longer == choose_decode(batch, 8, longest + 1, 128, 2, arch, 132)
    assert (longer.parts, longer.split, longer.num_ranges) == (0, True, 132 // 8)


@pytest.mark.parametrize("run", [EVEN_RUN, 128])
@pytest.mark.parametrize(("batch", "heads"), [(1, 8), (8, 8), (16, 1)])
def test_long_parts_stay_equal_on_large_pages(batch: int, heads: int, run: int) -> None:
    got = choose_decode(batch, heads, 131_072, 128, 2, "sm90", 132, even=True, run=run)
    assert (got.parts, got.split) == (132 // (batch * heads), True)


@pytest.mark.parametrize("run", [1, 16, 64])
@pytest.mark.parametrize(("batch", "heads"), [(16, 8), (9, 8), (64, 2), (67, 1)])
def test_requests_that_are_not_cut_stay_whole(batch: int, heads: int, run: int) -> None:
    for longest in (4096, 131_072):
        got = choose_decode(batch, heads, longest, 128, 2, "sm90", 132, even=True, run=run)
        assert (got.parts, got.split, got.num_ranges) == (0, False, batch)


@pytest.mark.parametrize("dim", [64, 256])
def test_long_wide_programs_of_other_head_sizes_keep_their_parts(dim: int) -> None:
    """Their ranges have tiles of their own, with which that was not measured."""
    assert choose_decode(1, 8, 131_072, dim, 2, "sm90", 132, even=True).parts == 132 // 8
    assert choose_decode(16, 8, 131_072, dim, 2, "sm90", 132, even=True).num_ranges == 16


@pytest.mark.parametrize("run", [16, 64])
@pytest.mark.parametrize(("batch", "longest"), [(64, 8192), (33, 131_072)])
def test_few_long_parts_of_one_kv_head_are_narrow_and_two_a_unit(batch: int, longest: int, run: int) -> None:
    got = choose_decode(batch, 1, longest, 128, 2, "sm90", 132, even=True, run=run)
    assert (got.block_n, got.num_warps, got.num_stages) == (64, 4, 3)
    assert (got.parts, got.num_ranges, got.overlap) == (264 // batch, 264 // batch * batch, 2)
    other = choose_decode(batch, 1, longest, 128, 2, "sm100", 132, even=True, run=run)
    assert (other.parts, other.overlap) == (132 // batch, 0), "not measured there"


@pytest.mark.parametrize(("batch", "longest", "run"), [(64, 8192, 1), (8, 131_072, 1), (8, 131_072, 16)])
def test_long_parts_of_one_kv_head_stay_equal(batch: int, longest: int, run: int) -> None:
    got = choose_decode(batch, 1, longest, 128, 2, "sm90", 132, even=True, run=run, scattered=run == 1)
    assert (got.block_n, got.num_stages, got.parts, got.overlap) == (128, 3, 132 // batch, 0)
    assert got.num_ranges == 132 // batch * batch
    fp8 = choose_decode(batch, 1, longest, 128, 2, "sm90", 132, even=True, run=run, kv_itemsize=1)
    assert fp8.parts == 0, "measured as ranges"


def test_equal_parts_have_two_tiles_at_least() -> None:
    for length, parts in ((1024, 4), (2048, 8), (300, 2), (256, 0), (128, 0)):
        assert choose_decode(1, 8, length, 128, 2, "sm90", 132, even=True).parts == parts


def test_many_requests_are_walked() -> None:
    got = choose_decode(100, 8, 1024, 128, 2, "sm90", 132, even=True)
    assert (got.parts, got.split, got.num_ranges) == (0, True, 33)


@pytest.mark.parametrize(
    ("batch", "even", "ranges"), [(64, True, 33), (17, True, 33), (64, False, 49), (128, True, 49)]
)
def test_scattered_keys_are_walked(batch: int, even: bool, ranges: int) -> None:
    """By two programs an SM where requests are equal, and not so many that programs would come and go."""
    row = decode_row("sm90", 128, 2)
    assert row.walk is not None
    got = choose_decode(batch, 8, 8192, 128, 2, "sm90", 132, even=even, scattered=True)
    assert (got.block_n, got.num_stages) == (row.walk.block_n, row.walk.num_stages)
    assert (got.parts, got.num_ranges, got.split) == (0, ranges, True)


def test_scattered_keys_of_few_equal_requests_have_wide_tiles() -> None:
    row = decode_row("sm90", 128, 2)
    for batch in (1, 16):
        got = choose_decode(batch, 8, 8192, 128, 2, "sm90", 132, even=True, scattered=True)
        assert (got.block_n, got.num_ranges) == (row.wide.block_n, 16)
    small = decode_row("sm90", 64, 2)
    got = choose_decode(64, 8, 8192, 64, 2, "sm90", 132, even=True, scattered=True)
    assert (got.block_n, got.num_stages) == (small.narrow.block_n, small.narrow.num_stages), "not measured"


@pytest.mark.parametrize(
    ("batch", "heads", "even", "stages"),
    [(256, 1, True, 3), (133, 1, True, 3), (128, 2, True, 4), (256, 1, False, 4), (265, 1, True, 4)],
)
def test_equal_requests_of_one_program_each_leave_room_for_three(
    batch: int, heads: int, even: bool, stages: int
) -> None:
    got = choose_decode(batch, heads, 2048, 128, 2, "sm90", 132, even=even, run=16)
    assert (got.block_n, got.num_warps, got.num_stages) == (64, 4, stages)
    assert not even or (got.num_ranges, got.split) == (batch, False)


def test_8_bit_keys_have_tiles_of_their_own() -> None:
    for even in (True, False):
        fp8 = choose_decode(64, 8, 8192, 128, 2, "sm90", 132, even=even, kv_itemsize=1)
        assert fp8.half
        assert (fp8.parts, fp8.num_ranges) == (0, 3 * 132 // 8)
    for run, longest in itertools.product((16, 64), (8192, 131_072)):  # also where none would be cut
        long = choose_decode(16, 8, longest, 128, 2, "sm90", 132, even=True, kv_itemsize=1, run=run)
        assert (long.parts, long.num_ranges, long.block_n) == (0, 3 * 132 // 8, 64)
    small = choose_decode(16, 8, 8192, 64, 2, "sm90", 132, even=True, kv_itemsize=1)
    assert (small.parts, small.num_ranges, small.block_n, small.num_warps) == (0, 3 * 132 // 8, 128, 4)
    one = choose_decode(1, 8, 8192, 128, 2, "sm90", 132, even=True, kv_itemsize=1)
    assert (one.parts, one.num_warps, one.overlap) == (132 // 8, 8, 2)
    assert not choose_decode(64, 8, 8192, 128, 2, "sm90", 132).half
    assert not choose_decode(64, 8, 8192, 128, 2, "sm89", 132, kv_itemsize=1).half, "not measured"


def test_short_requests_are_whole() -> None:
    """Without a cut there is no merge, whatever a table says."""
    got = choose_decode(300, 8, 128, 128, 2, "sm90", 132)
    assert (got.split, got.num_ranges, got.overlap) == (False, 300, 0)


def test_many_heads_take_the_narrow_tile() -> None:
    row = decode_row("sm90", 128, 2)
    for heads, tile in ((16, row.wide), (32, row.wide), (64, row.narrow)):
        assert choose_decode(1, 1, 131_072, 128, 2, "sm90", 132, heads=heads).block_n == tile.block_n


def test_a_row_may_be_for_some_versions_of_the_compiler() -> None:
    for version, warps in (("3.6.0", 16), ("3.7.1", 8), ("3.9.0", 16)):
        assert extend_row("gfx1100", 128, 2, 16, version).tile.num_warps == warps
    for arch, dim, itemsize in itertools.product(CHIPS, HEAD_SIZES, ITEM_SIZES):
        for version in ("3.6.0", "3.7.0", "3.8.0", "3.9.0"):
            assert arch in decode_row(arch, dim, itemsize, version).architectures
            assert arch in extend_row(arch, dim, itemsize, 16, version).architectures


def test_rows_are_reachable_and_say_where_they_come_from() -> None:
    """A row that an earlier one always covers is dead; evidence is never empty."""
    used = set()
    for arch in (*CHIPS, "sm87", "interpreter"):
        for dim, itemsize in itertools.product(HEAD_SIZES, ITEM_SIZES):
            for version in ("3.6.0", "3.7.1"):
                used.update(id(decode_row(arch, dim, itemsize, version, kv)) for kv in (1, itemsize))
                used.update(id(extend_row(arch, dim, itemsize, rows, version)) for rows in ROWS)
    for row in (*nvidia.DECODE, *nvidia.EXTEND, *amd.DECODE, *amd.EXTEND, *interpreter.DECODE):
        assert id(row) in used, row
        assert row.evidence, row


def test_more_rows_never_get_a_smaller_block() -> None:
    for arch, dim in itertools.product(CHIPS, HEAD_SIZES):
        blocks = [choose_extend(rows, dim, 2, arch).block_m for rows in ROWS]
        assert blocks == sorted(blocks)


@pytest.mark.parametrize(("rows", "by_hand"), [(64, False), (65, True), (256, True), (257, True)])
def test_the_kernel_by_hand_has_steps_of_more_rows_than_a_warpgroup(rows: int, by_hand: bool) -> None:
    for dim in (64, 128):
        assert (choose_extend(rows, dim, 2, "sm90").hopper is not None) == by_hand
    assert choose_extend(rows, 128, 2, "sm100").hopper is None


def test_the_cpu_is_the_interpreter() -> None:
    assert kernel_arch(torch.device("cpu")) == "interpreter"
    assert num_units(torch.device("cpu")) == 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels aren't compiled")
def test_every_head_size_can_be_compiled_on_demand() -> None:
    from anyattn.kernels.triton.aot import TARGETS, record
    from anyattn.kernels.triton.configs.aot_full import ENTRIES
    from anyattn.kernels.triton.configs.aot_full import HEAD_SIZES as LISTED

    assert set(LISTED) <= set(HEAD_SIZES)
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) == len(LISTED) * 4 * 5
    for entry in ENTRIES[::9]:
        launch = record(entry, TARGETS[entry.targets[0]])
        assert launch.options["num_warps"] >= 4


@pytest.mark.parametrize(
    ("batch", "heads", "longest", "early"), [(1, 8, 8192, 2), (16, 1, 16384, 0), (8, 8, 65536, 0)]
)
def test_only_short_programs_let_what_follows_start_early(
    batch: int, heads: int, longest: int, early: int
) -> None:
    got = choose_decode(batch, heads, longest, 128, 2, "sm90", 132, even=True)
    assert got.split
    assert got.overlap == early


@pytest.mark.parametrize(
    ("batch", "heads", "longest", "even", "alike"),
    [(1, 8, 8192, True, True), (16, 1, 8192, True, True), (64, 2, 4096, True, True),
     (64, 1, 8192, False, False), (8, 8, 65536, True, False), (64, 8, 8192, True, False)],
)  # fmt: skip
def test_wide_tiles_that_do_not_walk_read_v_at_the_offsets_of_k(
    batch: int, heads: int, longest: int, even: bool, alike: bool
) -> None:
    got = choose_decode(batch, heads, longest, 128, 2, "sm90", 132, even=even)
    assert got.alike == alike
    assert not choose_decode(batch, heads, longest, 128, 2, "sm100", 148, even=even).alike
