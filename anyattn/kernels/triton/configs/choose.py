"""Which tiles a shape gets: the first row of the architecture's table that covers it.

Tables are data (`nvidia.py`, `amd.py`, `interpreter.py`); nothing is tuned at run time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from anyattn.core.hashing import hashed_once
from anyattn.kernels.triton.configs import amd, interpreter, nvidia
from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = [
    "Decode",
    "Extend",
    "choose_decode",
    "choose_extend",
    "decode_row",
    "extend_row",
    "kernel_arch",
    "num_units",
    "power_of_two",
]

WIDE_HEADS = 32


@hashed_once
@dataclass(frozen=True)
class Decode:
    """Split-KV decode: BLOCK_N keys a tile, `num_splits` parts of each request."""

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int


@hashed_once
@dataclass(frozen=True)
class Extend:
    """Extend: BLOCK_M query rows by BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


@functools.cache
def kernel_arch(device: torch.device) -> str:
    """`sm90`, `gfx942`, … of a device; `interpreter` where there is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


@functools.cache
def num_units(device: torch.device) -> int:
    """SMs or CUs: what a grid should fill. A small number for the interpreter."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _covers(row: DecodeRow | ExtendRow, arch: str, dim: int, itemsize: int, version: str) -> bool:
    return (
        arch in row.architectures
        and dim <= row.max_dim
        and itemsize <= row.max_itemsize
        and (not row.triton or version.startswith(row.triton))
    )


@functools.cache
def decode_row(arch: str, dim: int, itemsize: int, version: str = triton.__version__) -> DecodeRow:
    """The row for heads of `dim` and elements of `itemsize` bytes; the smallest tiles for unknown chips."""
    dim = power_of_two(dim)  # what a tile holds
    for row in (*nvidia.DECODE, *amd.DECODE, *interpreter.DECODE):
        if _covers(row, arch, dim, itemsize, version):
            return row
    return interpreter.DECODE[-1]


@functools.cache
def extend_row(arch: str, dim: int, itemsize: int, rows: int, version: str = triton.__version__) -> ExtendRow:
    """The same for extends of at most `rows` query rows a request."""
    dim, rows = power_of_two(dim), power_of_two(rows)
    for row in (*nvidia.EXTEND, *amd.EXTEND, *interpreter.EXTEND):
        if rows <= row.max_rows and _covers(row, arch, dim, itemsize, version):
            return row
    return interpreter.EXTEND[-1]


@functools.lru_cache(1024)
def choose_decode(
    programs: int, max_kv_len: int, dim: int, itemsize: int, arch: str, units: int, heads: int = 16
) -> Decode:
    """Tiles and splits of a decode step.

    Args:
        programs: B x Hkv x head blocks, the grid without splits.
        max_kv_len: bound of KV lengths. dim: the larger head size. itemsize: bytes of the wider of q and KV.
        units: SMs or CUs. heads: query heads in one program.

    As long as one program per unit covers the grid, wide tiles; beyond, narrow ones with two programs a
    unit, and for more than 32 heads, whose scores would spill. A split has at least two tiles.
    """
    row = decode_row(arch, dim, itemsize)
    wide = programs <= units and heads <= WIDE_HEADS
    tile: Tile = row.wide if wide else row.narrow
    slots = units if wide else row.programs_per_unit * units
    tiles = -(-max_kv_len // tile.block_n)
    splits = min(max(1, slots // programs), max(1, -(-tiles // 2)))
    return Decode(tile.block_n, tile.num_warps, tile.num_stages, splits)


@functools.lru_cache(1024)
def choose_extend(max_rows: int, dim: int, itemsize: int, arch: str) -> Extend:
    """Tiles of an extend step; `max_rows`: query rows (tokens x packed heads) of the longest request."""
    row = extend_row(arch, dim, itemsize, power_of_two(min(max_rows, 1 << 20)))
    tile = row.tile
    return Extend(row.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.maxnreg)
