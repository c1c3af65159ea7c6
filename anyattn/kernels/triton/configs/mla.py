"""Tiles of latent attention. A row of a tile is one head of one token, and its accumulator the whole rank, so
few rows fit; sm90's were measured, others chosen from compiler reports (registers, spills, shared memory).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from anyattn.kernels.triton.configs.choose import MIN_TILES, Decode, fitting_ranges, power_of_two
from anyattn.kernels.triton.configs.rows import Tile

__all__ = ["MLA", "MLARow", "MLATiles", "choose_mla", "choose_mla_ranges", "choose_splits"]

_SM90 = ("sm90",)
_LARGE = ("sm80", "sm100", "sm103", "sm110")  # 160 KiB or more of shared memory a program
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_CDNA = ("gfx90a", "gfx942", "gfx950")
_RDNA = ("gfx1100", "gfx1151", "gfx1200", "gfx1201")


@dataclass(frozen=True, kw_only=True)
class MLARow:
    """Blocks of `block_rows` query rows by `tile.block_n` latents.

    `min_rows`, `max_rows`: query rows of the longest request; the item sizes: bytes of a stored element.
    `form`: `portable`, or one of Hopper's kernels (`mla_hopper_launch.mla_forms`), of which `keys` decodes.
    """

    architectures: tuple[str, ...]
    block_rows: int
    tile: Tile
    min_rows: int = 1
    max_rows: int = 1 << 30
    min_itemsize: int = 1
    max_itemsize: int = 4
    form: str = "portable"
    evidence: str = "compiler reports only"


@dataclass(frozen=True)
class MLATiles:
    """What a launch takes."""

    block_rows: int
    block_n: int
    num_warps: int
    num_stages: int
    form: str = "portable"


MLA = (
    MLARow(
        architectures=_SM90,
        max_rows=16,
        min_itemsize=2,
        form="keys",
        block_rows=16,
        tile=Tile(64, 4, 2),
        evidence="H200, 2026-11-29, 128 x 4k, 16 heads: 4,094 GB/s; 8 warps 3,969, FlashMLA 4,057",
    ),
    # Latents are converted in registers: four warps spill.
    MLARow(architectures=_SM90, max_rows=16, form="keys", block_rows=16, tile=Tile(64, 8, 2)),
    MLARow(
        architectures=_SM90,
        form="rows",
        block_rows=64,
        tile=Tile(64, 8, 2),
        evidence="H200, 2026-11-29, 64 x 8k, 128 heads: 453 TFLOP/s; FlashMLA 660",
    ),
    # Where those don't run. With fp8 latents to convert, 64 rows spill.
    MLARow(
        architectures=_SM90,
        min_rows=17,
        min_itemsize=2,
        max_itemsize=2,
        block_rows=64,
        tile=Tile(64, 8, 2),
        evidence="the same: 278 TFLOP/s; 64 x 32, 3 stages: 233; 32 x 32: 106",
    ),
    MLARow(
        architectures=_SM90,
        min_itemsize=2,
        max_itemsize=2,
        block_rows=16,
        tile=Tile(64, 4, 3),
        evidence="the same: 4,000 GB/s; 16 x 32: 3,039, two of them an SM: 3,891",
    ),
    MLARow(architectures=(*_SM90, *_LARGE), min_rows=17, block_rows=32, tile=Tile(32, 8, 3)),
    MLARow(architectures=(*_SM90, *_LARGE), block_rows=16, tile=Tile(32, 4, 3)),
    MLARow(architectures=_SMALL, min_rows=17, block_rows=32, tile=Tile(16, 8, 2)),
    MLARow(architectures=_SMALL, block_rows=16, tile=Tile(16, 4, 2)),
    MLARow(architectures=_CDNA, min_rows=17, block_rows=32, tile=Tile(16, 4, 1)),
    MLARow(architectures=_CDNA, block_rows=16, tile=Tile(16, 4, 1)),
    MLARow(architectures=_RDNA, block_rows=16, tile=Tile(16, 16, 1)),
    MLARow(architectures=("interpreter",), min_rows=17, block_rows=32, tile=Tile(16, 4, 1)),
    MLARow(architectures=("interpreter",), block_rows=16, tile=Tile(16, 4, 1)),
)
"""The first row of an architecture whose minima a step reaches."""


_AROUND = 2
"""Tiles' worth of time that a program takes to begin and to end."""
_FEW_SPLITS = 8
_SATURATED = 0.8
"""Of the units, how many read as fast as all: 100 x 4,096 on 132 SMs take 125 us whole, 135 in fifths."""


@functools.cache
def choose_mla(
    rows: int, itemsize: int, arch: str, forms: tuple[str, ...] = ("portable",), *, decode: bool = True
) -> MLATiles:
    """Tiles for `rows` query rows (tokens x heads) of the longest request; small ones for unknown chips.

    `forms`: kernels that take the layer's sizes.
    """
    for row in MLA:
        fits = (
            row.min_rows <= power_of_two(rows) <= row.max_rows
            and row.min_itemsize <= itemsize <= row.max_itemsize
        )
        allowed = row.form in forms and (decode or row.form != "keys")
        if arch in row.architectures and fits and allowed:
            return _tiles(row)
    return _tiles(MLA[-1])


def _tiles(row: MLARow) -> MLATiles:
    tile = row.tile
    return MLATiles(row.block_rows, tile.block_n, tile.num_warps, tile.num_stages, row.form)


@functools.lru_cache(1024)
def choose_splits(programs: int, max_kv_len: int, block_n: int, units: int) -> int:
    """Parts of each request, of two tiles at least, such that the last wave of programs isn't half empty.

    `programs`: the grid without splits; `units`: SMs or CUs, on each of which one program runs at once.
    """
    tiles = max(1, -(-max_kv_len // block_n))

    def cost(splits: int) -> float:  # tiles, one after another
        full, rest = divmod(programs * splits, units)
        waves = full + (max(_SATURATED, rest / units) if rest else 0.0)
        return waves * (-(-tiles // splits) + _AROUND) + (splits > 1)

    most = max(1, -(-tiles // 2))
    wanted = {*range(1, _FEW_SPLITS + 1), max(1, units // programs)}
    best: int = min(sorted(min(n, most) for n in wanted), key=cost)
    return best


@functools.lru_cache(1024)
def choose_mla_ranges(
    requests: int, programs: int, max_kv_len: int, tiles: MLATiles, units: int, *, even: bool
) -> Decode:
    """How a decode step of `requests` is dealt out, `programs` (head blocks) a range.

    `even`: requests are about equally long, and each is cut into as many parts; else all ranges are equal.
    """
    longest = max(1, -(-max_kv_len // tiles.block_n))
    ranges, parts = requests, 0
    if even:
        parts = choose_splits(requests * programs, max_kv_len, tiles.block_n, units)
        split = parts > 1
        ranges *= parts
    else:
        split = longest > MIN_TILES
        if split:
            ranges = min(fitting_ranges(programs, units), requests * longest)
    return Decode(
        tiles.block_n, tiles.num_warps, tiles.num_stages, ranges, MIN_TILES, split,
        parts=parts if split else 0,
    )  # fmt: skip
