"""Paged decode, one query token per request: a program streams a range of tiles for one KV head.

The table is read straight from `req_to_token`; how requests are cut into ranges is `ranges.py`'s.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink, capped, page_offsets, softmax_tile, table_slots
from anyattn.kernels.triton.decode_pairs import stream_pairs
from anyattn.kernels.triton.ranges import listed

__all__ = ["decode_kernel"]


@triton.jit
def _stream(
    q, b, row, start, length, lo, hi, source, source_row, slot_map, k_base, v_base, q_t, q_h,
    k_page, k_row, v_page, v_row, heads, in_group, logit_scale, cap, window,
    PAGE: tl.constexpr, SUB: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, UPCAST: tl.constexpr, PAIRS: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Keys `lo` to `hi` of request `b`, from column `start` on: the softmax's state `(m, den, acc)`."""
    if PAIRS > 0:
        return stream_pairs(
            q, b, row, start, length, lo, hi, source, source_row, slot_map, k_base, v_base, q_t, q_h,
            k_page, k_row, v_page, v_row, heads, in_group, logit_scale, cap, window,
            PAGE, SUB, D, DV, BLOCK_D, BLOCK_DV, BLOCK_H, BLOCK_N, HAS_CAP, HAS_WINDOW, PAIRS, FLAT, WIDE,
        )  # fmt: skip
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    entry = tl.arange(0, BLOCK_N // SUB) * SUB
    first_seen = length - window
    q_ptr = q + b.to(tl.int64) * q_t + heads[:, None] * q_h + offs_d[None, :]
    query = tl.load(q_ptr, mask=in_group[:, None] & (offs_d < D)[None, :], other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634
    table = source + row.to(tl.int64) * source_row + start
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    ahead = table_slots(table, lo + entry, lo + entry < hi, slot_map)
    for n in range(lo, hi, BLOCK_N):
        slots = ahead  # table entries of the next tile are fetched before this tile's keys
        ahead = table_slots(table, n + BLOCK_N + entry, n + BLOCK_N + entry < hi, slot_map)
        live = n + offs_n < hi
        k_off = page_offsets(slots, k_page, k_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
        key = tl.load(
            k_base + k_off[:, None] + offs_d[None, :], mask=live[:, None] & (offs_d < D)[None, :], other=0.0
        )
        v_off = k_off
        if not ALIKE:
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
    return m, den, acc


@triton.jit
def _finish(
    m, den, acc, b, r, whole, out, lse, sinks, part_out, part_lse, out_t, out_h, lse_t, v_scale,
    heads, in_group, kv_heads,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Where the state of request `b` goes: to `out`, with its sink, or to the pieces of range `r`."""
    offs_dv = tl.arange(0, BLOCK_DV)
    store_out = in_group[:, None] & (offs_dv < DV)[None, :]
    acc = acc * (tl.load(v_scale) / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = (m + tl.log2(den)) * 0.6931471805599453
    natural = tl.where(den == 0.0, float("-inf"), natural)
    if SPLIT:
        piece = (r + b).to(tl.int64) * (kv_heads * GROUP) + heads
        tl.store(part_lse + piece, natural, mask=in_group & (whole == 0))
        tl.store(part_out + piece[:, None] * DV + offs_dv[None, :], acc, mask=store_out & (whole == 0))
    if HAS_SINKS:
        acc, natural = apply_sink(
            acc, natural, tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32)
        )
    o_ptr = out + b.to(tl.int64) * out_t + heads[:, None] * out_h + offs_dv[None, :]
    tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=store_out & whole)
    if WRITE_LSE:
        tl.store(lse + b * lse_t + heads, natural, mask=in_group & whole)


@triton.jit
def decode_kernel(
    q, out, lse, sinks, q_t, q_h, out_t, out_h, lse_t,
    source, req_rows, kv_start, kv_lens, ranges, part_out, part_lse, source_row,
    k_cache, v_cache, slot_map, k_scale, v_scale, k_page, k_row, k_head, v_page, v_row, v_head,
    k_scale_h, v_scale_h, scale, cap, window, kv_heads,
    PAGE: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr, UPCAST: tl.constexpr, PAIRS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    ALIKE: tl.constexpr, UNIT: tl.constexpr, WALK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid `(R * Hkv * head_blocks,)`, heads fastest: they read neighbouring memory at the same time.

    `ranges int32 [R, FIELDS]`: see `ranges_kernel`, whose tiles are of UNIT keys. `slot_map` translates the
    table's slots to those of the cache; None: they are the same. A request that one range holds is written
    to `out`, with its sink; a piece of one that several hold to row `range + request` of
    `part_out [R + B, Hq, DV]` and `part_lse [R + B, Hq]`, natural log, without sinks. WALK: a range may hold
    several requests. PAIRS: 8-bit keys are read two at a time, and multiplied as float16; see `halves` and
    `attention.pairs`. ALIKE: V is read at K's offsets, which are the same.
    OVERLAP 1: the merge may be launched before the last program has ended (sm_90: programmatic dependent
    launch); 2: so was this kernel before the one in front of it.
    """
    tl.static_assert(UNIT % SUB == 0)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    if OVERLAP > 1:
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    programs = kv_heads * HEAD_BLOCKS
    r = pid // programs
    kv_head = pid % programs // HEAD_BLOCKS
    offs_h = pid % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    in_group = offs_h < GROUP
    heads = kv_head * GROUP + offs_h

    record = ranges + r * 16
    b = tl.load(record)
    at = tl.load(record + 1)
    left = tl.load(record + 2)
    row = tl.load(record + 4)
    start = tl.load(record + 5)
    length = tl.load(record + 6)
    k_base = k_cache + kv_head.to(tl.int64) * k_head
    v_base = v_cache + kv_head.to(tl.int64) * v_head
    logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)
    values_scale = v_scale + kv_head * v_scale_h
    if WALK:
        while left > 0:
            tiles = tl.maximum(tl.cdiv(length, UNIT), 1)
            stop = tl.minimum(left, tiles - at) + at
            whole = (at == 0) & (stop == tiles)
            lo = at * UNIT
            left -= stop - at
            m, den, acc = _stream(
                q, b, row, start, length, lo, tl.minimum(stop * UNIT, length), source, source_row,
                slot_map, k_base, v_base, q_t, q_h, k_page, k_row, v_page, v_row, heads, in_group,
                logit_scale, cap, window, PAGE, SUB, D, DV, BLOCK_D, BLOCK_DV, BLOCK_H, BLOCK_N,
                HAS_CAP, HAS_WINDOW, UPCAST, PAIRS, FLAT, WIDE, ALIKE,
            )  # fmt: skip
            row = tl.load(req_rows + b + 1, mask=left > 0, other=0).to(tl.int32)
            start, length = listed(kv_start, kv_lens, b + 1, left > 0, window, SUB, HAS_WINDOW)
            _finish(
                m, den, acc, b, r, whole, out, lse, sinks, part_out, part_lse, out_t, out_h, lse_t,
                values_scale, heads, in_group, kv_heads, GROUP, DV, BLOCK_DV,
                HAS_SINKS, WRITE_LSE, SPLIT,
            )  # fmt: skip
            at *= 0
            b += 1
    else:
        stop = at + left
        m, den, acc = _stream(
            q, b, row, start, length, at * UNIT, tl.minimum(stop * UNIT, length), source, source_row,
            slot_map, k_base, v_base, q_t, q_h, k_page, k_row, v_page, v_row, heads, in_group,
            logit_scale, cap, window, PAGE, SUB, D, DV, BLOCK_D, BLOCK_DV, BLOCK_H, BLOCK_N,
            HAS_CAP, HAS_WINDOW, UPCAST, PAIRS, FLAT, WIDE, ALIKE,
        )  # fmt: skip
        whole = (at == 0) & (stop == tl.maximum(tl.cdiv(length, UNIT), 1))
        _finish(
            m, den, acc, b, r, whole, out, lse, sinks, part_out, part_lse, out_t, out_h, lse_t,
            values_scale, heads, in_group, kv_heads, GROUP, DV, BLOCK_DV,
            HAS_SINKS, WRITE_LSE, SPLIT,
        )  # fmt: skip
    if OVERLAP > 0:
        tl.extra.cuda.gdc_launch_dependents()
