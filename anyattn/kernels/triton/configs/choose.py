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
    "fitting_ranges",
    "kernel_arch",
    "num_units",
    "power_of_two",
]

WIDE_HEADS = 32
MIN_TILES = 2
"""Fewer tiles of a range cost more to start and to merge than they save, but of the shortest requests."""
GOOD_FILL = 0.9
MANY_WAVES = 3
"""Programs that come and go cost more than ones that stay and walk."""
EVEN_TILES = 8
"""Wide parts of more tiles become ranges, even where requests are equally long: on an H200 (D 128, page 16)
that was 2 to 4 % faster for 8 x 8192 to 65536 tokens of 8 KV heads, equal before, and 3 to 9 % slower for 4
and 8 x 1024. Requests that needn't be cut stay whole: 64 x 4096 of 2 KV heads took 4 % longer as ranges; and
parts of one KV head stay equal, but narrow, two programs an SM, the merge starting early: four of each of
64 x 8192 took 70.6 us, two wide ones 72.0 (71.7 with the early start), the same as ranges 74.4."""
MANY_PARTS = 6
"""Wide parts of a request that would stay wide: fewer are narrow, 24 x 8192 tokens 3 % faster so."""
EVEN_RUN = 64
"""Consecutive slots from which on long parts stay equal: ranges took 9 % longer there for 1 x 131072."""
OVERLAP_TILES = 8
"""Programs of more tiles have no use for an early start of what follows, which takes room beside them: on an
H200, 64 x 8192 tokens of one KV head took 6 % longer with it, in parts of 32 tiles."""


@hashed_once
@dataclass(frozen=True)
class Decode:
    """Decode: tiles of BLOCK_N keys in `num_ranges` ranges of at least `min_tiles`.

    `split`: a request may be cut; if not, a range is a request. `parts`: every request is cut into as many,
    0 = all ranges are equal instead. `overlap`, `half`: see `DecodeRow`. `unit`: ranges are multiples of so
    many keys, which the run of a table entry divides; 0: of whole tiles. `alike`: see `DecodeRow`.
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_ranges: int
    min_tiles: int = 1
    split: bool = True
    overlap: int = 0
    parts: int = 0
    half: bool = False
    unit: int = 0
    alike: bool = False

    @property
    def keys(self) -> int:
        """What a range is counted in."""
        return self.unit or self.block_n


@hashed_once
@dataclass(frozen=True)
class Extend:
    """Extend: BLOCK_M query rows by BLOCK_N keys. `tma`, `hopper`: as in `ExtendRow`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    tma: Extend | None = None
    hopper: Extend | None = None


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
def decode_row(
    arch: str, dim: int, itemsize: int, version: str = triton.__version__, kv_itemsize: int = 2
) -> DecodeRow:
    """The row for heads of `dim` and elements of `itemsize` bytes, stored ones of `kv_itemsize`; the smallest
    tiles for unknown chips.
    """
    dim = power_of_two(dim)  # what a tile holds
    for row in (*nvidia.DECODE, *amd.DECODE, *interpreter.DECODE):
        if kv_itemsize <= row.max_kv_itemsize and _covers(row, arch, dim, itemsize, version):
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
    batch: int,
    programs: int,
    max_kv_len: int,
    dim: int,
    itemsize: int,
    arch: str,
    units: int,
    heads: int = 16,
    kv_itemsize: int = 2,
    even: bool = False,
    scattered: bool = False,
    run: int = 1,
) -> Decode:
    """Tiles and ranges of a decode step.

    Args:
        batch: requests. programs: of a range, KV heads x head blocks.
        max_kv_len: bound of KV lengths. dim: the larger head size. itemsize: bytes of the wider of q and KV.
        units: SMs or CUs. heads: query heads in one program. kv_itemsize: bytes of a stored element.
        even: requests are about equally long: each is cut into as many parts as there is room for.
        scattered: pages of few tokens, or offsets beyond 2^31: addresses cost more.
        run: consecutive slots that a table entry stands for.

    As long as one program per unit holds every request whole, wide tiles; beyond, narrow ones with several
    programs a unit, and for more than 32 heads, whose scores would spill, with twice the warps. What walks
    has tiles of its own where addresses cost more, or always; so have equal requests of one program each that
    are all there at once: 256 x 2048 took 70.2 us on an H200, in narrow tiles 71.7.
    """
    row = decode_row(arch, dim, itemsize, kv_itemsize=kv_itemsize)
    wide = batch * programs <= units and heads <= WIDE_HEADS
    tile, slots = (row.wide, units) if wide else (row.narrow, row.programs_per_unit * units)
    even = even and (batch * programs < MANY_WAVES * slots or row.walk_always != "")
    pairs = False
    if wide and batch * programs * -(-max_kv_len // tile.block_n) > EVEN_TILES * slots:
        even = even and not _ranges_even_so(row, slots // (batch * programs), run, programs)
        narrow = row.walk_always == "" and row.walk is not None and not scattered
        pairs = even and narrow and programs == 1 and 2 * batch <= slots <= MANY_PARTS * batch
    if pairs:
        wide, slots = False, row.programs_per_unit * units
    own = row.walk if row.walk_always == "" and heads <= WIDE_HEADS and not wide else None
    apart = own is not None and even and scattered
    walking = not even or apart or (row.walk_always == "always" and not wide)
    if walking and row.walk is not None and (row.walk_always or scattered):
        per_unit = row.programs_per_unit if apart else row.walk_per_unit
        tile, slots, wide = row.walk, per_unit * units, False
    elif own is not None and even and programs == 1 and batch <= slots:
        tile = own
    even = even and not walking
    tiles = max(1, -(-max_kv_len // tile.block_n))
    split = tiles > (1 if wide else MIN_TILES)
    ranges, parts = batch, 0
    if split and even:
        parts = min(max(1, slots // (batch * programs)), -(-tiles // MIN_TILES))
        ranges, split = batch * parts, parts > 1
    elif split:
        ranges = min(fitting_ranges(programs, slots), batch * tiles)
    warps = tile.num_warps * (1 if heads <= WIDE_HEADS else 2)
    short = split and (pairs or (wide and batch * tiles <= OVERLAP_TILES * ranges))
    return Decode(
        tile.block_n, warps, tile.num_stages, ranges, MIN_TILES, split, row.overlap if short else 0,
        parts if split else 0, row.half, alike=row.alike and wide and (even or not split),
    )  # fmt: skip


def _ranges_even_so(row: DecodeRow, parts: int, run: int, programs: int) -> bool:
    """Whether long wide `parts` of equal requests become ranges: always where those have tiles that were
    measured instead, never where they have others that were not.
    """
    ranged = parts > 1 and programs > 1 and run < EVEN_RUN
    return row.walk_always == "always" or (row.walk_always == "" and ranged)


def fitting_ranges(programs: int, slots: int) -> int:
    """Ranges of `programs` each that fill the slots once, or where few fit, up to four times."""
    fits = [max(1, waves * slots // programs) for waves in range(1, 5)]
    fill = [n * programs / (-(-n * programs // slots) * slots) for n in fits]
    good = [n for n, full in zip(fits, fill, strict=True) if full >= GOOD_FILL]
    return good[0] if good else fits[fill.index(max(fill))]


@functools.lru_cache(1024)
def choose_extend(max_rows: int, dim: int, itemsize: int, arch: str) -> Extend:
    """Tiles of an extend step; `max_rows`: query rows (tokens x packed heads) of the longest request."""
    row = extend_row(arch, dim, itemsize, power_of_two(min(max_rows, 1 << 20)))
    tma, hopper = (None if other is None else _extend(*other) for other in (row.tma, row.hopper))
    return _extend(row.block_m, row.tile, tma, hopper)


def _extend(block_m: int, tile: Tile, tma: Extend | None = None, hopper: Extend | None = None) -> Extend:
    return Extend(block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.maxnreg, tma, hopper)
