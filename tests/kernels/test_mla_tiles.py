"""Who gets which latent tiles."""

import pytest

pytest.importorskip("triton", reason="the portable extra isn't installed")

from anyattn.kernels.triton.configs.mla import MLA, choose_mla, choose_mla_ranges, choose_splits

HOPPER = ("portable", "rows", "keys")


@pytest.mark.parametrize(
    ("rows", "itemsize", "forms", "decode", "form", "block_rows"),
    [
        (16, 2, HOPPER, True, "keys", 16),
        (1, 1, HOPPER, True, "keys", 16),
        (16, 2, HOPPER, False, "rows", 64),
        (17, 2, HOPPER, True, "rows", 64),
        (128, 1, HOPPER, True, "rows", 64),
        (128, 2, ("portable",), True, "portable", 64),
        (16, 2, ("portable",), True, "portable", 16),
        (128, 1, ("portable",), True, "portable", 32),
        (128, 4, ("portable",), True, "portable", 32),
    ],
)
def test_hopper(
    rows: int, itemsize: int, forms: tuple[str, ...], decode: bool, form: str, block_rows: int
) -> None:
    tiles = choose_mla(rows, itemsize, "sm90", forms, decode=decode)
    assert (tiles.form, tiles.block_rows) == (form, block_rows)


def test_four_warps_hold_what_they_convert_only_where_nothing_is_converted() -> None:
    assert choose_mla(16, 2, "sm90", HOPPER).num_warps == 4
    assert choose_mla(16, 1, "sm90", HOPPER).num_warps == 8


@pytest.mark.parametrize("arch", sorted({arch for row in MLA for arch in row.architectures} - {"sm90"}))
@pytest.mark.parametrize("rows", [1, 16, 17, 128, 1 << 20])
def test_everybody_else_is_portable(arch: str, rows: int) -> None:
    for itemsize in (1, 2, 4):
        tiles = choose_mla(rows, itemsize, arch, HOPPER)
        assert tiles.form == "portable"
        assert tiles.block_rows <= max(16, 2 * rows)


def test_splits_fill_what_runs_at_once() -> None:
    assert choose_splits(128, 4096, 64, 132) == 1
    assert choose_splits(1, 8192, 64, 132) == 64
    assert choose_splits(16, 65536, 64, 132) == 8
    assert choose_splits(4, 64, 64, 132) == 1


@pytest.mark.parametrize("programs", [1, 2, 16, 33, 64, 100, 128, 132, 133, 200, 256, 1000])
@pytest.mark.parametrize("length", [1, 64, 1000, 4096, 65536])
def test_splits_never_cost_more_waves_of_tiles(programs: int, length: int) -> None:
    splits = choose_splits(programs, length, 64, 132)
    tiles = -(-length // 64)
    assert 1 <= splits <= max(1, -(-tiles // 2))
    assert -(-programs * splits // 132) * -(-tiles // splits) <= -(-programs // 132) * tiles


def test_a_half_empty_wave_is_split() -> None:
    assert choose_splits(70, 8192, 64, 132) in (3, 5)
    assert choose_splits(200, 8192, 64, 132) in (3, 5)


def test_most_units_read_as_fast_as_all() -> None:
    assert choose_splits(100, 4096, 64, 132) == 1


@pytest.mark.parametrize(
    ("requests", "heads", "length", "ranges"),
    [(64, 16, 7698, 132), (64, 128, 8192, 66), (1, 16, 1 << 17, 132), (2, 16, 192, 6), (300, 16, 4096, 132)],
)
def test_ranges_are_a_number_of_the_chip(requests: int, heads: int, length: int, ranges: int) -> None:
    """One program an SM, however many requests; no more than there are tiles."""
    tiles = choose_mla(heads, 2, "sm90", HOPPER)
    programs = -(-heads // tiles.block_rows)
    dealt = choose_mla_ranges(requests, programs, length, tiles, 132, even=False)
    assert (dealt.num_ranges, dealt.parts, dealt.split) == (ranges, 0, True)
    assert dealt.block_n == tiles.block_n


def test_equal_requests_have_equal_parts() -> None:
    keys, rows = choose_mla(16, 2, "sm90", HOPPER), choose_mla(128, 2, "sm90", HOPPER)
    whole = choose_mla_ranges(128, 1, 4096, keys, 132, even=True)
    assert (whole.num_ranges, whole.parts, whole.split) == (128, 0, False)
    cut = choose_mla_ranges(16, 1, 8192, keys, 132, even=True)
    assert (cut.num_ranges, cut.parts, cut.split) == (128, 8, True)
    one = choose_mla_ranges(1, 2, 8192, rows, 132, even=True)
    assert (one.num_ranges, one.parts, one.split) == (64, 64, True)


def test_nothing_is_cut_where_no_request_has_more_than_two_tiles() -> None:
    dealt = choose_mla_ranges(5, 1, 128, choose_mla(16, 2, "sm90", HOPPER), 132, even=False)
    assert (dealt.num_ranges, dealt.parts, dealt.split) == (5, 0, False)
