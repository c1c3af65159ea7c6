"""Merges of split-KV partials: exact, any number of them, sinks counted once."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink

__all__ = ["merge_kernel", "merge_ranges_kernel"]


@triton.jit
def merge_kernel(
    part_out, part_lse, sinks, out, lse, out_t, out_h, lse_t, num_heads, num_splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """Grid `(T * Hq,)`. `part_out [T, Hq, S, DV]` float32, `part_lse [T, Hq, S]` natural log.

    Empty splits have lse = -inf; their output is never read.
    """
    pid = tl.program_id(0).to(tl.int64)
    token = pid // num_heads
    head = pid % num_heads
    offs_s = tl.arange(0, BLOCK_S)
    offs_dv = tl.arange(0, BLOCK_DV)
    m = tl.full([1], float("-inf"), tl.float32)
    den = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for s in range(0, num_splits, BLOCK_S):
        row = pid * num_splits + s + offs_s
        part = tl.load(part_lse + row, mask=s + offs_s < num_splits, other=float("-inf"))
        used = part > float("-inf")
        tile = tl.load(
            part_out + row[:, None] * DV + offs_dv[None, :],
            mask=used[:, None] & (offs_dv < DV)[None, :], other=0.0,
        )  # fmt: skip
        new_m = tl.maximum(m, tl.max(part, 0))
        safe = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp(part - safe)
        alpha = tl.exp(m - safe)
        den = den * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, None] * tile, 0)[None, :]
        m = new_m
    acc = acc / tl.where(den == 0.0, 1.0, den)[:, None]
    natural = tl.where(den == 0.0, float("-inf"), m + tl.log(den))
    if HAS_SINKS:
        acc, natural = apply_sink(
            acc, natural, tl.load(sinks + head).to(tl.float32) + tl.zeros([1], tl.float32)
        )
    one = tl.arange(0, 1)
    o_ptr = out + token * out_t + head * out_h + one[:, None] + offs_dv[None, :]
    tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=(offs_dv < DV)[None, :])
    if WRITE_LSE:
        tl.store(lse + token * lse_t + head + one, natural)


@triton.jit
def merge_ranges_kernel(
    out, lse, sinks, out_t, out_h, lse_t, num_heads, ranges, part_out, part_lse,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, OVERLAP: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Grid `(R / EVERY * Hq,)`: range r's programs merge the request that begins in it and ends in a later
    one. EVERY: requests begin in every so manieth range alone.

    `part_out [R + B, Hq, DV]` float32, `part_lse [R + B, Hq]` natural log, as `decode_kernel` writes them.
    """
    r = tl.program_id(0) // num_heads * EVERY
    head = tl.program_id(0) % num_heads
    b = tl.load(ranges + r * 16 + 8)  # older than the kernel in front, which has waited for what it reads
    pieces = tl.load(ranges + r * 16 + 9)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if pieces > 0:
        offs_s = tl.arange(0, BLOCK_S)
        offs_dv = tl.arange(0, BLOCK_DV)
        m = tl.full([1], float("-inf"), tl.float32)
        den = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_DV], tl.float32)
        for s in range(0, pieces, BLOCK_S):
            row = (r + b + s + offs_s).to(tl.int64) * num_heads + head
            inside = s + offs_s < pieces
            part = tl.load(part_lse + row, mask=inside, other=float("-inf"))
            tile = tl.load(
                part_out + row[:, None] * DV + offs_dv[None, :],
                mask=inside[:, None] & (offs_dv < DV)[None, :], other=0.0,
            )  # fmt: skip
            new_m = tl.maximum(m, tl.max(part, 0))
            safe = tl.where(new_m == float("-inf"), 0.0, new_m)
            weight = tl.exp(part - safe)
            alpha = tl.exp(m - safe)
            den = den * alpha + tl.sum(weight, 0)
            acc = acc * alpha[:, None] + tl.sum(weight[:, None] * tile, 0)[None, :]
            m = new_m
        acc = acc / tl.where(den == 0.0, 1.0, den)[:, None]
        natural = tl.where(den == 0.0, float("-inf"), m + tl.log(den))
        if HAS_SINKS:
            acc, natural = apply_sink(
                acc, natural, tl.load(sinks + head).to(tl.float32) + tl.zeros([1], tl.float32)
            )
        one = tl.arange(0, 1)
        o_ptr = out + b.to(tl.int64) * out_t + head * out_h + one[:, None] + offs_dv[None, :]
        tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=(offs_dv < DV)[None, :])
        if WRITE_LSE:
            tl.store(lse + b * lse_t + head + one, natural)
