"""What a row of a configuration table holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeRow", "ExtendRow", "Tile"]

_ANY = 1 << 30


@dataclass(frozen=True)
class Tile:
    """Keys per tile and how a program runs. `maxnreg` caps registers, for two programs per SM."""

    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    """Decode tiles of some architectures for heads up to `max_dim` and elements up to `max_itemsize` bytes.

    `max_kv_itemsize`: the same of stored elements alone. `wide` is used while one program per unit covers
    the grid, else `narrow`, with `programs_per_unit`.
    `walk`: where ranges hold several requests, with `walk_per_unit` programs, in every such step, in those
    with scattered keys alone, or instead of narrow equal parts too. Scattered keys of equal requests, where
    these alone have it, are walked as well, with `programs_per_unit`: on an H200, 64 x 8192 on pages of one
    token took 496.7 us so, 502.4 with three programs an SM, 505.2 in narrow tiles. `half`: 8-bit keys are
    read in pairs and multiplied as float16, made by an instruction of sm_89.
    `overlap`: kernels that start before the one in front has ended, with wide tiles: 0 none, 1 the merge,
    2 decode too. `alike`: in wide tiles that don't walk, V's offsets aren't computed where they are K's.
    `triton`: beginnings of the versions that the row is for; none = all.
    """

    architectures: tuple[str, ...]
    max_dim: int
    wide: Tile
    narrow: Tile
    max_itemsize: int = 2
    max_kv_itemsize: int = 8
    programs_per_unit: int = 2
    walk: Tile | None = None
    walk_per_unit: int = 3
    walk_always: str = ""
    half: bool = False
    overlap: int = 0
    alike: bool = False
    triton: tuple[str, ...] = ()
    evidence: str = ""


@dataclass(frozen=True, kw_only=True)
class ExtendRow:
    """Extend tiles for requests of at most `max_rows` query rows (tokens x packed heads).

    `tma`: rows and tile where all keys can be read through tensor descriptors; None = never. `hopper`: the
    same of the kernel scheduled by hand (128 rows, 4 warps and more of its own).
    """

    architectures: tuple[str, ...]
    max_dim: int
    block_m: int
    tile: Tile
    tma: tuple[int, Tile] | None = None
    hopper: tuple[int, Tile] | None = None
    max_rows: int = _ANY
    max_itemsize: int = 2
    triton: tuple[str, ...] = ()
    evidence: str = ""
