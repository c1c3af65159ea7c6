"""Absorbed decode over latents: a tile of latents is loaded once and read as keys and as values.

How requests are cut into ranges is `ranges.py`'s.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import capped, page_offsets, softmax_tile

__all__ = ["mla_decode_kernel"]


@triton.jit
def _stream(
    q, cache, table, b, lo, hi, heads, q_t, q_h, c_page, c_row, logit_scale, cap,
    PAGE: tl.constexpr, SUB: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, UPCAST: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Latents `lo` to `hi` of request `b`: the softmax's state `(m, den, acc)`."""
    in_heads = heads < HEADS
    offs_c = tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    in_c = (offs_c < RANK)[None, :]
    in_r = (offs_r < ROPE)[None, :]
    q_row = q + b.to(tl.int64) * q_t + heads[:, None] * q_h
    query = tl.load(q_row + offs_c[None, :], mask=in_heads[:, None] & in_c, other=0.0)
    query_rope = tl.load(q_row + RANK + offs_r[None, :], mask=in_heads[:, None] & in_r, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
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
    return m, den, acc


@triton.jit
def _finish(
    m, den, acc, b, r, whole, used, stored, heads, out, lse, part_out, part_lse, out_t, out_h, lse_t,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_C: tl.constexpr, WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """To `out` where range `r` holds request `b` whole, else to its piece. Not `used`: a part without
    keys.
    """
    in_heads = heads < HEADS
    offs_c = tl.arange(0, BLOCK_C)
    store_out = in_heads[:, None] & (offs_c < RANK)[None, :]
    acc = acc * (stored / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
    if SPLIT:
        piece = (r + b).to(tl.int64) * HEADS + heads
        part = used & (whole == 0)
        tl.store(part_lse + piece, natural, mask=in_heads & part)
        tl.store(part_out + piece[:, None] * RANK + offs_c[None, :], acc, mask=store_out & part)
    o_ptr = out + b.to(tl.int64) * out_t + heads[:, None] * out_h + offs_c[None, :]
    tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=store_out & whole)
    if WRITE_LSE:
        tl.store(lse + b.to(tl.int64) * lse_t + heads, natural, mask=in_heads & whole)


@triton.jit
def mla_decode_kernel(
    q, cache, source, req_rows, kv_lens, ranges, kv_scale, out, lse, part_out, part_lse,
    q_t, q_h, c_page, c_row, source_row, out_t, out_h, lse_t, scale, cap,
    PAGE: tl.constexpr, SUB: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr, WALK: tl.constexpr,
    UPCAST: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid `(R * head_blocks,)`, heads fastest: they read the same latents at the same time.

    `q [B, HEADS, RANK + ROPE]`, latent part first. `ranges int32 [R, FIELDS]`: see `ranges_kernel`. A request
    that one range holds is written to `out`; a piece of one that several hold to row `range + request` of
    `part_out [R + B, HEADS, RANK]` and `part_lse [R + B, HEADS]`, natural log. WALK: a range may hold several
    requests.
    """
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    r = tl.program_id(0) // HEAD_BLOCKS
    heads = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    record = ranges + r * 16
    b = tl.load(record)
    at = tl.load(record + 1)
    left = tl.load(record + 2)
    row = tl.load(record + 4)
    length = tl.load(record + 6)
    stored = tl.load(kv_scale)
    if WALK:
        while left > 0:
            tiles = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
            stop = tl.minimum(left, tiles - at) + at
            left -= stop - at
            m, den, acc = _stream(
                q, cache, source + row.to(tl.int64) * source_row, b, at * BLOCK_N,
                tl.minimum(stop * BLOCK_N, length), heads, q_t, q_h, c_page, c_row, scale * stored, cap,
                PAGE, SUB, HEADS, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_H, BLOCK_N, HAS_CAP, UPCAST, FLAT, WIDE,
            )  # fmt: skip
            row = tl.load(req_rows + b + 1, mask=left > 0, other=0).to(tl.int32)
            length = tl.load(kv_lens + b + 1, mask=left > 0, other=0)
            _finish(
                m, den, acc, b, r, (at == 0) & (stop == tiles), stop > at, stored, heads, out, lse,
                part_out, part_lse, out_t, out_h, lse_t, HEADS, RANK, BLOCK_C, WRITE_LSE, SPLIT,
            )  # fmt: skip
            at *= 0
            b += 1
    else:
        m, den, acc = _stream(
            q, cache, source + row.to(tl.int64) * source_row, b, at * BLOCK_N,
            tl.minimum((at + left) * BLOCK_N, length), heads, q_t, q_h, c_page, c_row, scale * stored, cap,
            PAGE, SUB, HEADS, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_H, BLOCK_N, HAS_CAP, UPCAST, FLAT, WIDE,
        )  # fmt: skip
        whole = (at == 0) & (left == tl.maximum(tl.cdiv(length, BLOCK_N), 1))
        _finish(
            m, den, acc, b, r, whole, left > 0, stored, heads, out, lse,
            part_out, part_lse, out_t, out_h, lse_t, HEADS, RANK, BLOCK_C, WRITE_LSE, SPLIT,
        )  # fmt: skip
