"""KV write: scaled once, saturated, into any pool layout that strides can say."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["kv_write_kernel"]


@triton.jit
def _store(x, x_t, x_h, cache, c_page, c_row, c_head, scale, scale_h, t, slot, limit,
           PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
           SCALED: tl.constexpr, SATURATE: tl.constexpr):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    head = offs // D
    dim = offs % D
    # A token without a slot (nothing is mapped where it goes) must not reach memory in front of the pool.
    live = (offs < HEADS * D) & (slot >= 0)
    value = tl.load(x + t * x_t + head * x_h + dim, mask=live)
    if SCALED:
        value = tl.div_rn(value.to(tl.float32), tl.load(scale + head * scale_h, mask=live, other=1.0))
    if SATURATE:
        wide = value.to(tl.float32)
        # A NaN must stay visible: only numbers are clamped.
        value = tl.where(wide != wide, wide, tl.minimum(tl.maximum(wide, -limit), limit))
    page = slot // PAGE
    target = cache + page * c_page + (slot % PAGE) * c_row + head * c_head + dim
    tl.store(target, value.to(cache.dtype.element_ty), mask=live)


@triton.jit
def kv_write_kernel(
    k, v, loc, k_t, k_h, v_t, v_h,
    k_cache, v_cache, k_scale, v_scale, kc_page, kc_row, kc_head, vc_page, vc_row, vc_head,
    k_scale_h, v_scale_h, limit,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SCALED: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Grid `(T,)`: token t of `k [T, Hkv, D]`, `v [T, Hkv, DV]` goes to slot `loc[t]`."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + t)
    _store(k, k_t, k_h, k_cache, kc_page, kc_row, kc_head, k_scale, k_scale_h, t, slot, limit,
           PAGE, HEADS, D, BLOCK_K, SCALED, SATURATE)  # fmt: skip
    _store(v, v_t, v_h, v_cache, vc_page, vc_row, vc_head, v_scale, v_scale_h, t, slot, limit,
           PAGE, HEADS, DV, BLOCK_V, SCALED, SATURATE)  # fmt: skip
