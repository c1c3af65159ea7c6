"""Which steps of several query tokens have their keys cut, and into what."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from anyattn.core.hashing import hashed_once
from anyattn.kernels.triton.configs.choose import (
    GOOD_FILL,
    MIN_TILES,
    OVERLAP_TILES,
    Decode,
    choose_extend,
    fitting_ranges,
    power_of_two,
)
from anyattn.kernels.triton.configs.rows import Tile
from anyattn.kernels.triton.configs.verify import DEFAULT, VERIFY, VerifyRow

__all__ = ["FEW_ROWS", "MASKED_ROWS", "Verify", "choose_few", "choose_verify", "verify_row"]

FEW_ROWS = 16
"""Query rows of a request that has few beside others that have many: the smallest block there is."""
MASKED_ROWS = 32
"""On sm_90, 64 rows by 64 cells spill, and leave room for one program an SM."""
ALONE_TILES = 16
"""Programs of fewer tiles, by the bound of lengths, are not halved: on an H200 one request of 8k tokens and
16 drafts (bound 16k) took 19.8 us with one an SM, 25.0 with two (FA3 19.5). From 31 tiles on two are faster.
"""
UNIT = 16
"""Keys that equal parts are multiples of: 16 of 8,208 keys are of 528 then, where tiles of 64 make 15 of 576.
On an H200, 1 x 8k + 16 took 7 % less so, 1 x 8k + 4 as long.
"""
WIDE_TILES = 16
"""On an H200, 16 x 8k + 8 took 145 us (page 64) and 149 (page 16) with one program of wide tiles a request,
152 and 154 with two of narrow ones; 161 and 151 where lengths differed. FA3: 135, 138 and 162. Fewer tiles
weren't measured.
"""


@hashed_once
@dataclass(frozen=True)
class Verify:
    """Blocks of `block_m` query rows (tokens x query heads of a KV head), `row_blocks` for the `max_new`
    tokens that a request has at most; `keys`: how keys are cut, and how programs run. `half`: 8-bit keys are
    multiplied as float16.
    """

    block_m: int
    row_blocks: int
    max_new: int
    keys: Decode
    half: bool = False


@functools.cache
def verify_row(arch: str, dim: int, itemsize: int, rows: int) -> VerifyRow:
    """The row for heads of `dim`, elements of `itemsize` bytes and at most `rows` query rows a request; that
    with most of them where there are more.
    """
    dim = power_of_two(dim)
    covering = [
        row
        for row in VERIFY
        if arch in row.architectures and dim <= row.max_dim and itemsize <= row.max_itemsize
    ]
    return next((row for row in covering if rows <= row.max_rows), (covering or [DEFAULT])[-1])


def choose_verify(
    batch: int,
    kv_heads: int,
    group: int,
    max_new: int,
    max_kv_len: int,
    dim: int,
    itemsize: int,
    arch: str,
    units: int,
    even: bool = False,
    masked: bool = False,
    kv_itemsize: int = 2,
    run: int = 1,
) -> Verify | None:
    """How a step of `batch` requests of at most `max_new` tokens is cut; None: row blocks fill the chip, or
    there are too many rows, or too few keys for a cut to pay.

    Args:
        group: query heads of a KV head. max_kv_len: bound of KV lengths; the next power of two decides all
            but which programs are short.
        dim: the larger head size. itemsize: bytes of the wider of q and KV. units: SMs or CUs.
        even: requests are about equally long: each is cut into as many parts as there is room for.
        masked: every column has cells of a mask, which take registers: blocks have at most `MASKED_ROWS`.
        kv_itemsize: bytes of a stored element. run: consecutive slots that a table entry stands for.
    """
    bound = power_of_two(max_kv_len)
    made = _cut(
        batch, kv_heads, group, max_new, bound, dim, itemsize, arch, units, even, masked, kv_itemsize, run
    )
    if made is None:
        return None
    keys = made[0].keys
    tiles = -(-max_kv_len // keys.block_n)
    # A tile is over where a request of 8k has 16 new tokens: on an H200 that took 4 % less with the start.
    # Equal parts gained by it at any length, 1 to 2 %: there is a merge for each request.
    return made[keys.parts > 1 or batch * tiles < (OVERLAP_TILES + 1) * keys.num_ranges]


@functools.lru_cache(1024)
def _cut(
    batch: int, kv_heads: int, group: int, max_new: int, max_kv_len: int, dim: int, itemsize: int, arch: str,
    units: int, even: bool, masked: bool, kv_itemsize: int, run: int,
) -> tuple[Verify, Verify] | None:  # fmt: skip
    """`choose_verify` for a power of two, of long programs and of short ones."""
    rows = max_new * group
    row = verify_row(arch, dim, itemsize, rows)
    narrow = verify_row(arch, dim, itemsize, min(rows, MASKED_ROWS)) if masked else row
    block_m = narrow.block_m if rows > 16 else 16
    tile = narrow.tile or _tile(dim, itemsize, arch)
    row_blocks = -(-rows // block_m)
    programs = kv_heads * row_blocks
    whole = _whole(narrow, batch * programs, max_kv_len, units)
    tile = whole or tile
    tiles = -(-max_kv_len // tile.block_n)
    if rows > row.max_rows or batch * programs > row.fill * units or max_kv_len < row.min_keys:
        return None
    alone = whole is not None or batch * programs * tiles <= ALONE_TILES * units
    if alone and whole is None and narrow.alone is not None:
        tile = narrow.alone
        tiles = -(-max_kv_len // tile.block_n)
    slots, parts = (1 if alone else row.programs_per_unit) * units, 0
    if even:
        parts = min(slots // (batch * programs), -(-tiles // MIN_TILES))
    if parts < 2 and whole is None:  # no room for equal parts: the chip is filled by unequal ones
        parts = 0
    ranges = batch * parts or min(fitting_ranges(programs, slots), batch * tiles)
    unit = max(UNIT, run & -run) if parts > 1 else 0
    keys = Decode(
        tile.block_n, tile.num_warps, tile.num_stages, ranges, MIN_TILES, split=parts != 1, parts=parts,
        unit=unit if unit < tile.block_n else 0,
    )  # fmt: skip
    late = Verify(block_m, row_blocks, max_new, keys, row.half and kv_itemsize == 1)
    return late, replace(late, keys=replace(keys, overlap=row.overlap)) if row.overlap else late


@functools.lru_cache(1024)
def choose_few(
    batch: int,
    kv_heads: int,
    group: int,
    max_kv_len: int,
    dim: int,
    itemsize: int,
    arch: str,
    units: int,
    kv_itemsize: int = 2,
) -> Verify | None:
    """How the requests of at most `FEW_ROWS` query rows are cut, in a step whose others have more: into equal
    ranges, as their lengths are anything. None: the rows of one token are more. Arguments: `choose_verify`.
    """
    if group > FEW_ROWS:
        return None
    row = verify_row(arch, dim, itemsize, FEW_ROWS)
    tile = row.few or row.tile or _tile(dim, itemsize, arch)
    slots = (row.few_per_unit or row.programs_per_unit) * units
    ranges = min(fitting_ranges(kv_heads, slots), batch * -(-max_kv_len // tile.block_n))
    keys = Decode(tile.block_n, tile.num_warps, tile.num_stages, ranges, MIN_TILES)
    return Verify(FEW_ROWS, 1, FEW_ROWS // group, keys, row.half and kv_itemsize == 1)


def _whole(row: VerifyRow, programs: int, max_kv_len: int, units: int) -> Tile | None:
    """The tile of one program a unit for each request, where that fills the chip and they are long."""
    wide = row.wide
    fits = GOOD_FILL * units <= programs <= units
    return wide if wide is not None and fits and max_kv_len > WIDE_TILES * wide.block_n else None


def _tile(dim: int, itemsize: int, arch: str) -> Tile:
    """That of the extend kernel for 16 rows."""
    extend = choose_extend(16, dim, itemsize, arch)
    return Tile(extend.block_n, extend.num_warps, extend.num_stages)
