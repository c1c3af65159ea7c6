"""The vectors of a step, read by the device from the pinned memory that the host packed them into.

A copy of a few kilobytes goes to the copy engine, which the host starts at more cost than a kernel, and which
the kernels behind it wait for. One program a few hundred integers reads them across the bus instead.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pull_kernel"]


@triton.jit
def _moved(source, region, first, length, to, i, NARROW: tl.constexpr):
    """`length` int64 from entry `first` of the source, to byte `to` of the region."""
    live = i < length
    values = tl.load(source.to(tl.pointer_type(tl.int64)) + first + i, mask=live, other=0)
    if NARROW:
        tl.store((region + to).to(tl.pointer_type(tl.int32)) + i, values.to(tl.int32), mask=live)
    else:
        tl.store((region + to).to(tl.pointer_type(tl.int64)) + i, values, mask=live)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "to0", "to1", "to2", "to3", "to4"])
def pull_kernel(
    source, region, n0, n1, n2, n3, n4, to0, to1, to2, to3, to4,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `(ceil(longest / BLOCK), parts)`.

    `source`: int64 vectors of `n` entries, one behind the other; `region` uint8: vector k is stored from byte
    `to` on, as int32 where bit k of NARROW is set.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    at = n0
    if part == 0:
        _moved(source, region, 0, n0, to0, i, NARROW & 1)
    if part == 1:
        _moved(source, region, at, n1, to1, i, NARROW >> 1 & 1)
    at += n1
    if part == 2:
        _moved(source, region, at, n2, to2, i, NARROW >> 2 & 1)
    at += n2
    if part == 3:
        _moved(source, region, at, n3, to3, i, NARROW >> 3 & 1)
    at += n3
    if part == 4:
        _moved(source, region, at, n4, to4, i, NARROW >> 4 & 1)
