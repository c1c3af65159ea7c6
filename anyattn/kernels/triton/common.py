"""Pieces that the attention kernels share: page addressing, one softmax tile, sinks."""

# ruff: noqa: ANN001, ANN201, ANN202, SIM108, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply_sink", "capped", "page_offsets", "softmax_tile", "table_slots"]


@triton.jit
def table_slots(table, at, live, slot_map):
    """Slots of the tokens at columns `at` of a request's row, translated once where there is a map."""
    slots = tl.load(table + at, mask=live, other=0)
    if slot_map is not None:
        slots = tl.load(slot_map + slots, mask=live, other=0)
    return slots


@triton.jit
def page_offsets(
    first, page_stride, row_stride, PAGE: tl.constexpr, SUB: tl.constexpr, N: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Element offsets `[N]` of N tokens from the slots `first [N / SUB]` of every SUB-th one.

    SUB consecutive tokens share a page, so one table entry serves them all. FLAT: slots lie at
    `slot * row_stride` (NHD). WIDE: offsets pass 2^31 and are computed in int64.
    """
    if WIDE:
        first = first.to(tl.int64)
    if FLAT:  # noqa: SIM108
        base = first * row_stride
    else:
        base = (first // PAGE) * page_stride + (first % PAGE) * row_stride
    if SUB == 1:
        flat = base
    else:
        rows = tl.arange(0, SUB) * row_stride
        flat = tl.reshape(base[:, None] + rows[None, :], [N])
    # Without the hint the alignment is lost in the indirection and every load becomes scalar.
    return tl.multiple_of(flat, 16)


@triton.jit
def capped(qk, scale, cap):
    """Scaled logits under the cap, in base 2: `cap * tanh(scale * qk / cap) * log2(e)`."""
    doubled = tl.exp2(qk * (scale / cap * 2.8853900817779268))
    return (cap * 1.4426950408889634) * (1.0 - 2.0 / (doubled + 1.0))


@triton.jit
def softmax_tile(qk, v, m, den, acc, scale):
    """One online-softmax step in base 2: `qk [M, N]` (-inf = unseen), `v [N, Dv]`, state `(m, den, acc)`.

    `scale` takes qk to base-2 logits and is positive. Rows that saw nothing keep m = -inf.
    """
    new_m = tl.maximum(m, tl.max(qk, 1) * scale)
    safe = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(qk * scale - safe[:, None])
    alpha = tl.exp2(m - safe)
    den = den * alpha + tl.sum(p, 1)
    if v.dtype == tl.float32:
        # A tile is summed by itself and added once: one rounding at the size of the whole sum a tile, not
        # one a key, which at 64k keys is worth 1e-5. (A plain `+` would be fused back into the dot.)
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), tl.dot(p, v, input_precision="ieee"))
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_m, den, acc


@triton.jit
def apply_sink(acc, lse, sink):
    """`acc [M, Dv]` and natural `lse [M]` with one sink logit per row counted."""
    top = tl.maximum(lse, sink)
    total = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    return acc * tl.exp(lse - total)[:, None], total
