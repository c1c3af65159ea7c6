"""Tiles of latent attention. A row of a tile is one head of one token, and its accumulator the whole rank, so
few rows fit; chosen from compiler reports (registers, spills, shared memory), not measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.configs.rows import Tile

__all__ = ["MLA", "MLARow", "MLATiles", "choose_mla", "choose_splits"]

_BIG = ("sm80", "sm90", "sm100", "sm103", "sm110")  # 160 KiB or more of shared memory a program
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_CDNA = ("gfx90a", "gfx942", "gfx950")
_RDNA = ("gfx1100", "gfx1151", "gfx1200", "gfx1201")


@dataclass(frozen=True, kw_only=True)
class MLARow:
    """Blocks of `block_rows` query rows by `tile.block_n` latents; `min_rows`: of the longest request."""

    architectures: tuple[str, ...]
    block_rows: int
    tile: Tile
    min_rows: int = 1


@dataclass(frozen=True)
class MLATiles:
    """What a launch takes."""

    block_rows: int
    block_n: int
    num_warps: int
    num_stages: int


MLA = (
    MLARow(architectures=_BIG, min_rows=33, block_rows=64, tile=Tile(32, 8, 2)),
    MLARow(architectures=_BIG, min_rows=17, block_rows=32, tile=Tile(32, 4, 2)),
    MLARow(architectures=_BIG, block_rows=16, tile=Tile(32, 4, 3)),
    MLARow(architectures=_SMALL, min_rows=17, block_rows=32, tile=Tile(16, 8, 2)),
    MLARow(architectures=_SMALL, block_rows=16, tile=Tile(16, 4, 2)),
    MLARow(architectures=_CDNA, min_rows=17, block_rows=32, tile=Tile(16, 4, 1)),
    MLARow(architectures=_CDNA, block_rows=16, tile=Tile(16, 4, 1)),
    MLARow(architectures=_RDNA, block_rows=16, tile=Tile(16, 8, 1)),
    MLARow(architectures=("interpreter",), min_rows=17, block_rows=32, tile=Tile(16, 4, 1)),
    MLARow(architectures=("interpreter",), block_rows=16, tile=Tile(16, 4, 1)),
)
"""The first row of an architecture whose `min_rows` a step reaches."""


@functools.cache
def choose_mla(rows: int, arch: str) -> MLATiles:
    """Tiles for `rows` query rows (tokens x heads) of the longest request; small ones for unknown chips."""
    found = next((r for r in MLA if arch in r.architectures and power_of_two(rows) >= r.min_rows), MLA[-1])
    tile = found.tile
    return MLATiles(found.block_rows, tile.block_n, tile.num_warps, tile.num_stages)


def choose_splits(programs: int, max_kv_len: int, block_n: int, units: int) -> int:
    """Parts of each request: one program a unit, at least two tiles a part. `programs`: without splits."""
    tiles = -(-max_kv_len // block_n)
    return min(max(1, units // programs), max(1, -(-tiles // 2)))
