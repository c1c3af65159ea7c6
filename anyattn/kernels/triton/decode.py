"""Paged split-KV decode: one query token per request, table read straight from `req_to_token`."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink, capped, page_offsets, softmax_tile, table_slots

__all__ = ["decode_kernel"]


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, source, slot_map, req_rows, kv_start, kv_lens, k_scale, v_scale, sinks,
    out, lse, part_out, part_lse,
    q_t, q_h, k_page, k_row, k_head, v_page, v_row, v_head, source_row, out_t, out_h, lse_t,
    k_scale_h, v_scale_h, scale, cap, window, num_splits, min_tiles, kv_heads,
    PAGE: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr, UPCAST: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid `(num_splits * head_blocks * Hkv * B,)`, splits fastest.

    `slot_map` translates the table's slots to those of the cache; None: they are the same.
    Partials: `part_out [B, Hq, S, DV]`, `part_lse [B, Hq, S]`, natural log, without sinks.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    split = pid % num_splits
    pid = pid // num_splits
    block = pid % HEAD_BLOCKS
    pid = pid // HEAD_BLOCKS
    kv_head = pid % kv_heads
    b = (pid // kv_heads).to(tl.int64)

    offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    in_group = offs_h < GROUP
    heads = kv_head * GROUP + offs_h
    length = tl.load(kv_lens + b)
    start = tl.load(kv_start + b)
    if HAS_WINDOW:  # the table begins at a page; skip to the sub-page that holds the first visible key
        skip = tl.maximum(length - window, 0) // SUB * SUB
        first_seen = length - window - skip
        start += skip
        length -= skip
    tiles = tl.cdiv(length, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), min_tiles)
    lo = split * per_split * BLOCK_N
    hi = tl.minimum(lo + per_split * BLOCK_N, length)

    q_ptr = q + b * q_t + heads[:, None] * q_h + offs_d[None, :]
    query = tl.load(q_ptr, mask=in_group[:, None] & (offs_d < D)[None, :], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    table = source + tl.load(req_rows + b) * source_row + start
    k_base = k_cache + kv_head.to(tl.int64) * k_head
    v_base = v_cache + kv_head.to(tl.int64) * v_head
    logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)
    base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634

    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    entry = tl.arange(0, BLOCK_N // SUB) * SUB
    ahead = table_slots(table, lo + entry, lo + entry < hi, slot_map)
    for n in range(lo, hi, BLOCK_N):
        slots = ahead  # table entries of the next tile are fetched before this tile's keys
        ahead = table_slots(table, n + BLOCK_N + entry, n + BLOCK_N + entry < hi, slot_map)
        live = n + offs_n < hi
        k_off = page_offsets(slots, k_page, k_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
        key = tl.load(
            k_base + k_off[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < D)[None, :], other=0.0
        )
        v_off = page_offsets(slots, v_page, v_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
        value = tl.load(
            v_base + v_off[:, None] + offs_dv[None, :],
            mask=live[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
        )
        key = key.to(query.dtype)
        value = value.to(query.dtype)
        qk = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_CAP:
            qk = capped(qk, logit_scale, cap)
        seen = live
        if HAS_WINDOW:
            seen = seen & (n + offs_n >= first_seen)
        qk = tl.where(seen[None, :], qk, float("-inf"))
        m, den, acc = softmax_tile(qk, value, m, den, acc, base2)

    acc = acc * (tl.load(v_scale + kv_head * v_scale_h) / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = (m + tl.log2(den)) * 0.6931471805599453
    natural = tl.where(den == 0.0, float("-inf"), natural)
    store_out = in_group[:, None] & (offs_dv < DV)[None, :]
    if SPLIT:
        slot = (b * kv_heads * GROUP + heads) * num_splits + split
        tl.store(part_lse + slot, natural, mask=in_group)
        tl.store(part_out + slot[:, None] * DV + offs_dv[None, :], acc, mask=store_out & (hi > lo))
    else:
        if HAS_SINKS:
            acc, natural = apply_sink(
                acc, natural, tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32)
            )
        o_ptr = out + b * out_t + heads[:, None] * out_h + offs_dv[None, :]
        tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=store_out)
        if WRITE_LSE:
            tl.store(lse + b * lse_t + heads, natural, mask=in_group)
