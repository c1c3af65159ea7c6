"""Absorbed extend over latents: any number of new tokens a request, everything read from the pool."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import capped, page_offsets, softmax_tile
from anyattn.kernels.triton.extend import _find_request

__all__ = ["mla_extend_kernel"]


@triton.jit
def mla_extend_kernel(
    q, cache, source, req_rows, query_offsets, prefix_lens, cells, mask_indptr, kv_scale, out, lse,
    part_out, part_lse,
    q_t, q_h, c_page, c_row, source_row, out_t, out_h, lse_t, scale, cap, num_requests, num_blocks,
    num_splits, min_tiles,
    PAGE: tl.constexpr, SUB: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_CAP: tl.constexpr, WRITE_LSE: tl.constexpr, SPLIT: tl.constexpr,
    UPCAST: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid `(num_splits * HEADS / PACK * num_blocks,)`, splits fastest, late row blocks (the longest) first.

    PACK heads of a token are rows of one block of `TOKENS = BLOCK_M // PACK` tokens; a block belongs to one
    request and `num_blocks >= T // TOKENS + B`. A mask replaces the causal rule; its columns are key indices.
    Partials: `part_out [T, HEADS, S, RANK]`, `part_lse [T, HEADS, S]`, natural log.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    HEAD_BLOCKS: tl.constexpr = HEADS // PACK
    pid = tl.program_id(0)
    split = pid % num_splits
    pid = pid // num_splits
    block = num_blocks - 1 - pid // HEAD_BLOCKS
    b = _find_request(query_offsets, block, num_requests, TOKENS)
    offset = tl.load(query_offsets + b)
    extend = tl.load(query_offsets + b + 1) - offset
    t0 = (block - (offset // TOKENS + b)) * TOKENS
    if t0 >= extend:
        return

    rows = tl.arange(0, BLOCK_M)
    token = t0 + rows // PACK
    heads = (pid % HEAD_BLOCKS) * PACK + rows % PACK
    valid = (token < extend) & (rows < TOKENS * PACK)
    token = tl.where(valid, token, -1)
    row = (offset + tl.maximum(token, 0)).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    in_c = (offs_c < RANK)[None, :]
    in_r = (offs_r < ROPE)[None, :]
    q_row = q + row[:, None] * q_t + heads[:, None] * q_h
    query = tl.load(q_row + offs_c[None, :], mask=valid[:, None] & in_c, other=0.0)
    query_rope = tl.load(q_row + RANK + offs_r[None, :], mask=valid[:, None] & in_r, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
        query_rope = query_rope.to(tl.float32)
    prefix = tl.load(prefix_lens + b)
    seq_len = prefix + extend
    end = seq_len
    mask_row = cells
    if HAS_MASK:
        mask_row = cells + tl.load(mask_indptr + b) + tl.maximum(token, 0).to(tl.int64) * seq_len
    else:  # the last key that a row of this block sees
        end = tl.minimum(prefix + t0 + TOKENS, seq_len)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits), min_tiles)
    lo = split * per_split * BLOCK_N
    hi = tl.minimum(lo + per_split * BLOCK_N, end)
    table = source + tl.load(req_rows + b) * source_row
    stored = tl.load(kv_scale)
    logit_scale = scale * stored
    base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    full = prefix + t0 + 1  # keys that every row sees
    entry = tl.arange(0, BLOCK_N // SUB) * SUB
    ahead = tl.load(table + lo + entry, mask=lo + entry < hi, other=0)
    for n in range(lo, hi, BLOCK_N):
        slots = ahead  # table entries of the next tile are fetched before this tile's latents
        ahead = tl.load(table + n + BLOCK_N + entry, mask=n + BLOCK_N + entry < hi, other=0)
        column = n + offs_n
        live = column < hi
        base = cache + page_offsets(slots, c_page, c_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)[:, None]
        latent = tl.load(base + offs_c[None, :], mask=live[:, None] & in_c, other=0.0).to(query.dtype)
        rope = tl.load(base + RANK + offs_r[None, :], mask=live[:, None] & in_r, other=0.0).to(query.dtype)
        qk = tl.dot(query, tl.trans(latent), input_precision="ieee")
        qk = tl.dot(query_rope, tl.trans(rope), qk, input_precision="ieee")
        if HAS_CAP:
            qk = capped(qk, logit_scale, cap)
        # Whole tiles that every row sees skip the mask: the condition is the same for all threads.
        if HAS_MASK or n + BLOCK_N > tl.minimum(full, hi):
            seen = live[None, :] & valid[:, None]
            if HAS_MASK:
                seen = seen & (tl.load(mask_row[:, None] + column[None, :], mask=seen, other=0) != 0)
            else:
                seen = seen & (column[None, :] <= prefix + token[:, None])
            qk = tl.where(seen, qk, float("-inf"))
        m, den, acc = softmax_tile(qk, latent, m, den, acc, base2)

    acc = acc * (stored / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
    store_out = valid[:, None] & in_c
    if SPLIT:
        slot = (row * HEADS + heads) * num_splits + split
        tl.store(part_lse + slot, natural, mask=valid)
        tl.store(part_out + slot[:, None] * RANK + offs_c[None, :], acc, mask=store_out & (hi > lo))
    else:
        o_ptr = out + row[:, None] * out_t + heads[:, None] * out_h + offs_c[None, :]
        tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=store_out)
        if WRITE_LSE:
            tl.store(lse + row * lse_t + heads, natural, mask=valid)
