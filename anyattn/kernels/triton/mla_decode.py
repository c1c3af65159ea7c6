"""Absorbed split-KV decode over latents: a tile of latents is loaded once and read as keys and as values."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import capped, page_offsets, softmax_tile

__all__ = ["mla_decode_kernel"]


@triton.jit
def mla_decode_kernel(
    q, cache, source, req_rows, kv_lens, kv_scale, out, lse, part_out, part_lse,
    q_t, q_h, c_page, c_row, source_row, out_t, out_h, lse_t,
    scale, cap, num_splits, min_tiles,
    PAGE: tl.constexpr, SUB: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid `(num_splits * head_blocks * B,)`, splits fastest. `q [B, HEADS, RANK + ROPE]`, latent part first.

    Partials: `part_out [B, HEADS, S, RANK]`, `part_lse [B, HEADS, S]`, natural log.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    split = pid % num_splits
    pid = pid // num_splits
    b = (pid // HEAD_BLOCKS).to(tl.int64)
    heads = (pid % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = heads < HEADS
    offs_c = tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    in_c = (offs_c < RANK)[None, :]
    in_r = (offs_r < ROPE)[None, :]
    length = tl.load(kv_lens + b)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits), min_tiles)
    lo = split * per_split * BLOCK_N
    hi = tl.minimum(lo + per_split * BLOCK_N, length)

    q_row = q + b * q_t + heads[:, None] * q_h
    query = tl.load(q_row + offs_c[None, :], mask=in_heads[:, None] & in_c, other=0.0)
    query_rope = tl.load(q_row + RANK + offs_r[None, :], mask=in_heads[:, None] & in_r, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
    table = source + tl.load(req_rows + b) * source_row
    stored = tl.load(kv_scale)
    logit_scale = scale * stored
    base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    entry = tl.arange(0, BLOCK_N // SUB) * SUB
    ahead = tl.load(table + lo + entry, mask=lo + entry < hi, other=0)
    for n in range(lo, hi, BLOCK_N):
        slots = ahead  # table entries of the next tile are fetched before this tile's latents
        ahead = tl.load(table + n + BLOCK_N + entry, mask=n + BLOCK_N + entry < hi, other=0)
        live = n + offs_n < hi
        row = cache + page_offsets(slots, c_page, c_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)[:, None]
        latent = tl.load(row + offs_c[None, :], mask=live[:, None] & in_c, other=0.0).to(query.dtype)
        rope = tl.load(row + RANK + offs_r[None, :], mask=live[:, None] & in_r, other=0.0).to(query.dtype)
        qk = tl.dot(query, tl.trans(latent), input_precision="ieee")
        qk = tl.dot(query_rope, tl.trans(rope), qk, input_precision="ieee")
        if HAS_CAP:
            qk = capped(qk, logit_scale, cap)
        qk = tl.where(live[None, :], qk, float("-inf"))
        m, den, acc = softmax_tile(qk, latent, m, den, acc, base2)

    acc = acc * (stored / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
    store_out = in_heads[:, None] & in_c
    if SPLIT:
        slot = (b * HEADS + heads) * num_splits + split
        tl.store(part_lse + slot, natural, mask=in_heads)
        tl.store(part_out + slot[:, None] * RANK + offs_c[None, :], acc, mask=store_out & (hi > lo))
    else:
        o_ptr = out + b * out_t + heads[:, None] * out_h + offs_c[None, :]
        tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=store_out)
        if WRITE_LSE:
            tl.store(lse + b * lse_t + heads, natural, mask=in_heads)
