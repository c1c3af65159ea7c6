"""How a decode step is dealt out: the KV of all requests as one line of tiles, cut into equal ranges.

Made on the device from the lengths of the step, once for all layers, so that a captured graph serves any
lengths: its grid is a number of ranges that depends on the chip alone.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FEW_TILES", "FIELDS", "deal", "few_keys_kernel", "listed", "ranges_kernel"]

FIELDS = 16
"""int32 of a range's record: first request, first tile in it, tiles, requests, then the first request's row,
first column and length; from 8 on the request that begins here and ends in a later range, and its ranges.
"""

FEW_TILES = tl.constexpr(16)
"""Where no request has more, ranges may have one alone: merges are one pass, and latency is all that they
cost. Equal parts have `MIN_TILES` always.
"""

_FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def listed(kv_start, kv_lens, b, live, window, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """First column and number of keys of requests `b`: a window skips to the run with its first key."""
    start = tl.load(kv_start + b, mask=live, other=0)
    length = tl.load(kv_lens + b, mask=live, other=0)
    if HAS_WINDOW:
        skip = tl.maximum(length - window, 0) // SUB * SUB
        start += skip
        length -= skip
    return start, length


@triton.jit
def _listed(first, second, b, live, window, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr):
    """`listed`, of tables (`kv_start`, `kv_lens`; PAGE 0) or of what makes those in the same launch:
    `seq_lens`, `extend_lens` and the page that a trimmed table begins at.
    """
    if PAGE == 0:
        start, length = listed(first, second, b, live, window, SUB, HAS_WINDOW)
    else:
        length = tl.load(first + b, mask=live, other=0)
        start = length * 0
        if HAS_WINDOW:
            start = tl.maximum(length - tl.load(second + b, mask=live, other=0) - (window - 1), 0)
            start -= start % PAGE
            length -= start
            skip = tl.maximum(length - window, 0) // SUB * SUB
            start += skip
            length -= skip
    return start, length


@triton.jit
def _tiles(
    first, second, b, batch, window,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Tiles of requests `b`: one where there is no key, whose output is still to be written."""
    _, length = _listed(first, second, b, b < batch, window, SUB, HAS_WINDOW, PAGE)
    return tl.where(b < batch, tl.maximum(tl.cdiv(length, BLOCK_N), 1), 0)


@triton.jit
def _whole(tiles, fewest, longest, num_ranges):
    """The shortest range such that requests cut into ranges of their own are at most `num_ranges`."""
    low = fewest
    high = tl.maximum(longest, fewest)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, middle), 0) <= num_ranges
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low


@triton.jit
def _part(
    req_rows, first, second, ranges, r, window,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The record of one part of a request that has as many as all others."""
    b = r // PARTS
    start, length = _listed(first, second, b, True, window, SUB, HAS_WINDOW, PAGE)
    tiles = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
    step = tl.maximum(tl.cdiv(tiles, PARTS), MIN_TILES)
    at = r % PARTS * step
    pieces = tl.cdiv(tiles, step)
    record = ranges + r * 16
    tl.store(record, b)
    tl.store(record + 1, at)
    tl.store(record + 2, tl.maximum(tl.minimum(step, tiles - at), 0))
    tl.store(record + 3, (at < tiles).to(tl.int32))
    tl.store(record + 4, tl.load(req_rows + b).to(tl.int32))
    tl.store(record + 5, start)
    tl.store(record + 6, length)
    tl.store(record + 8, b)
    tl.store(record + 9, tl.where((at == 0) & (pieces > 1), pieces, 0))


@triton.jit
def _range(
    req_rows, lens, news, ranges, r, batch, num_ranges, window,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr, OWN: tl.constexpr, BLOCK_B: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The record of range `r` of the line of all tiles."""
    i = tl.arange(0, BLOCK_B)
    total = tl.zeros([], tl.int32)
    longest = tl.zeros([], tl.int32)
    if SPLIT:
        for first in range(0, batch, BLOCK_B):
            tiles = _tiles(lens, news, first + i, batch, window, BLOCK_N, SUB, HAS_WINDOW, PAGE)
            total += tl.sum(tiles, 0)
            longest = tl.maximum(longest, tl.max(tiles, 0))
    fewest = tl.where(longest > FEW_TILES, MIN_TILES, 1)
    step = tl.maximum(tl.cdiv(total, num_ranges), fewest)
    round_to = tl.full([], 1, tl.int32)
    if OWN:
        tiles = _tiles(lens, news, i, batch, window, BLOCK_N, SUB, HAS_WINDOW, PAGE)
        own = _whole(tiles, step, longest, num_ranges)
        if own * 16 <= step * 17 + 16:  # a request more in a range costs about a tile
            step = own
            round_to = own

    begin = r * step
    end = begin + step
    before = tl.zeros([], tl.int32)
    first_b = tl.zeros([], tl.int32)
    last_b = tl.zeros([], tl.int32)
    first_at = tl.zeros([], tl.int32)
    last_at = tl.zeros([], tl.int32)
    last_end = tl.full([], _FAR, tl.int32)
    for first in range(0, batch, BLOCK_B):
        tiles = _tiles(lens, news, first + i, batch, window, BLOCK_N, SUB, HAS_WINDOW, PAGE)
        tiles = tl.cdiv(tiles, round_to) * round_to
        ends = before + tl.cumsum(tiles, 0)
        before += tl.sum(tiles, 0)
        real = first + i < batch
        first_b += tl.sum((real & (ends <= begin)).to(tl.int32), 0)
        last_b += tl.sum((real & (ends < end)).to(tl.int32), 0)
        first_at = tl.maximum(first_at, tl.max(tl.where(real & (ends <= begin), ends, 0), 0))
        last_at = tl.maximum(last_at, tl.max(tl.where(real & (ends < end), ends, 0), 0))
        last_end = tl.minimum(last_end, tl.min(tl.where(real & (ends >= end), ends, _FAR), 0))
    if not SPLIT:
        first_b = r
        last_b = r
    used = first_b < batch
    start, length = _listed(lens, news, first_b, used, window, SUB, HAS_WINDOW, PAGE)
    at = begin - first_at
    count = tl.minimum(end, before) - begin
    if round_to > 1:  # the last range of a request may be rounded up
        count = tl.minimum(count, tl.maximum(tl.cdiv(length, BLOCK_N), 1) - at)
    if not SPLIT:
        at = 0
        count = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
    record = ranges + r * 16
    tl.store(record, first_b)
    tl.store(record + 1, at)
    tl.store(record + 2, count)
    tl.store(record + 3, tl.where(used, tl.minimum(last_b, batch - 1) - first_b + 1, 0))
    tl.store(record + 4, tl.load(req_rows + first_b, mask=used, other=0).to(tl.int32))
    tl.store(record + 5, start)
    tl.store(record + 6, length)
    crosses = (last_at >= begin) & (last_end > end) & (last_end < _FAR)
    tl.store(record + 8, last_b)
    tl.store(record + 9, tl.where(crosses, tl.cdiv(last_end, step) - r, 0))


@triton.jit
def deal(
    req_rows, first, second, ranges, r, batch, num_ranges, window,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr, OWN: tl.constexpr, BLOCK_B: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Range `r`: see `ranges_kernel`; `first`, `second`, PAGE: see `_listed`."""
    if PARTS > 0:
        _part(req_rows, first, second, ranges, r, window,
              BLOCK_N, SUB, HAS_WINDOW, MIN_TILES, PARTS, PAGE)  # fmt: skip
    else:
        _range(req_rows, first, second, ranges, r, batch, num_ranges, window,
               BLOCK_N, SUB, HAS_WINDOW, MIN_TILES, SPLIT, OWN, BLOCK_B, PAGE)  # fmt: skip


@triton.jit(do_not_specialize=("batch", "num_ranges", "window"))
def ranges_kernel(
    req_rows, kv_start, kv_lens, ranges, batch, num_ranges, window,
    BLOCK_N: tl.constexpr, SUB: tl.constexpr, HAS_WINDOW: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr, OWN: tl.constexpr, BLOCK_B: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid `(R,)`, a program a range; `ranges int32 [R, FIELDS]`.

    OWN (a batch of at most R and BLOCK_B requests): where it costs little, no range holds two requests.
    Not SPLIT: range r is request r. PARTS: every request is cut into so many ranges, those of request b
    are b * PARTS and the next; 0: not so.
    """
    deal(req_rows, kv_start, kv_lens, ranges, tl.program_id(0), batch, num_ranges, window,
         BLOCK_N, SUB, HAS_WINDOW, MIN_TILES, SPLIT, OWN, BLOCK_B, PARTS, 0)  # fmt: skip


@triton.jit(do_not_specialize=("batch", "max_new"))
def few_keys_kernel(query_offsets, kv_lens, few_lens, batch, max_new, BLOCK: tl.constexpr):
    """Grid `(cdiv(B, BLOCK),)`: `few_lens int32 [B]`, keys of requests with `max_new` tokens at most, of
    others none."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < batch
    begin = tl.load(query_offsets + b, mask=live, other=0)
    end = tl.load(query_offsets + b + 1, mask=live, other=0)
    keys = tl.load(kv_lens + b, mask=live, other=0)
    tl.store(few_lens + b, tl.where(end - begin > max_new, 0, keys), mask=live)
