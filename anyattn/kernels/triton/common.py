"""Pieces that the attention kernels share: page addressing, one softmax tile, sinks."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply_sink", "page_offsets", "softmax_tile"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def page_offsets(first, page_stride, row_stride, PAGE: tl.constexpr, SUB: tl.constexpr, N: tl.constexpr):
    """Element offsets int64 `[N]` of N tokens from the slots `first [N / SUB]` of every SUB-th one.

    SUB consecutive tokens share a page, so one table entry serves them all.
    """
    base = (first // PAGE).to(tl.int64) * page_stride + (first % PAGE) * row_stride
    rows = tl.arange(0, SUB) * row_stride
    flat = tl.reshape(base[:, None] + rows[None, :], [N])
    # Without the hint the alignment is lost in the indirection and every load becomes scalar.
    return tl.multiple_of(flat, 16)


@triton.jit
def softmax_tile(qk, seen, v, m, den, acc, scale, cap, HAS_CAP: tl.constexpr):
    """One online-softmax step in base 2: raw scores `qk [M, N]`, `v [N, Dv]`, state `(m, den, acc)`.

    `scale` is the softmax scale (with the K scale folded in); rows that see nothing keep m = -inf.
    """
    if HAS_CAP:
        x = qk * (scale / cap)
        s = (cap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))
    else:
        s = qk * (scale * 1.4426950408889634)
    s = tl.where(seen, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(s - safe[:, None])
    alpha = tl.exp2(m - safe)
    den = den * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_m, den, acc


@triton.jit
def apply_sink(acc, lse, sink):
    """`acc [M, Dv]` and natural `lse [M]` with one sink logit per row counted."""
    top = tl.maximum(lse, sink)
    total = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    return acc * tl.exp(lse - total)[:, None], total
