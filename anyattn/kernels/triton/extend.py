"""Variable-length extend: cached keys through the table, this step's keys from the arguments or the pool.

One program per (row block, head). A row block belongs to one request; requests are found by binary
search, so the grid depends on T and B alone and no work list crosses to the host.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink, capped, page_offsets, table_slots

__all__ = ["extend_kernel", "softmax_rows"]


@triton.jit
def _find_request(query_offsets, block, num_requests, TOKENS: tl.constexpr):
    """Request whose row blocks contain `block`: request i owns blocks from `offset_i // TOKENS + i` on."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_offsets + middle) // TOKENS + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _seen(
    column, live, token, q_pos, k_pos, prefix, seq_len, window, cells,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, TWO_SIDED: tl.constexpr,
):  # fmt: skip
    """Bool `[M, N]`: columns are key indices, the window is in positions, a mask replaces the causal rule."""
    seen = live[None, :] & (token >= 0)[:, None]
    if HAS_MASK:
        at = token.to(tl.int64)[:, None] * seq_len + column[None, :]
        seen = seen & (tl.load(cells + at, mask=seen, other=0) != 0)
    elif CAUSAL:
        seen = seen & (column[None, :] <= prefix + token[:, None])
    if HAS_WINDOW:
        gap = q_pos[:, None] - k_pos[None, :]
        seen = seen & (gap < window)
        if TWO_SIDED:
            seen = seen & (gap > -window)
    return seen


@triton.jit
def _between(column, first, last, HAS_FIRST: tl.constexpr):
    """Bool `[M, N]`: columns from `first` to `last`, each a number or one of each row `[M, 1]`."""
    seen = column[None, :] <= last
    if HAS_FIRST:
        seen = seen & (column[None, :] >= first)
    return seen


@triton.jit
def softmax_rows(qk, v, m, den, acc, scale):
    """`common.softmax_tile` for rows whose m begins at a finite floor: two registers and two instructions a
    row less.
    """
    new_m = tl.maximum(m, tl.max(qk, 1) * scale)
    p = tl.exp2(qk * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    den = den * alpha + tl.sum(p, 1)
    if v.dtype == tl.float32:
        acc = tl.fma(acc, tl.broadcast_to(alpha[:, None], acc.shape), tl.dot(p, v, input_precision="ieee"))
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return new_m, den, acc


# Batches come in any size: one kernel for all, whatever divides their numbers.
@triton.jit(do_not_specialize=["num_requests", "num_blocks", "few"])
def extend_kernel(
    q, k, v, source, req_rows, query_offsets, prefix_lens, kv_start, sinks, out, lse,
    num_requests, num_blocks, few, key_offsets, pool_lens, positions, cells, mask_indptr,
    k_cache, v_cache, slot_map, k_scale, v_scale,
    q_t, q_h, k_t, k_h, v_t, v_h, k_page, k_row, k_head, v_page, v_row, v_head, source_row,
    out_t, out_h, lse_t, k_scale_h, v_scale_h, scale, cap, window, num_heads,
    PAGE: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    POOL: tl.constexpr, DIRECT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WRITE_LSE: tl.constexpr, UPCAST: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """Grid `(num_blocks * num_heads,)`, heads fastest, late row blocks (the longest) first.

    PACK query heads of a KV head are rows of one block (`num_heads` is then Hq / PACK). POOL reads
    `pool_lens` tokens through the table (and `slot_map`, where there is one), DIRECT rows
    `key_offsets[b] ..` of k and v. `TOKENS = BLOCK_M // PACK` tokens a block; `num_blocks >= T // TOKENS +
    B`. ALIKE: K and V of the pool have the same strides. ANCHOR begins tiles at multiples of BLOCK_N from
    position 0, so that a row's reduction order doesn't depend on where its table or its step begins.
    Requests of up to `few` new tokens are left to another kernel.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    # Without a mask, a caller's positions in a window or a window ahead, a row sees one range of columns.
    RANGE: tl.constexpr = not (HAS_MASK or (HAS_WINDOW and (HAS_POSITIONS or not CAUSAL)))
    pid = tl.program_id(0)
    head_id = pid % num_heads
    block = num_blocks - 1 - pid // num_heads
    b = _find_request(query_offsets, block, num_requests, TOKENS)
    offset = tl.load(query_offsets + b)
    extend = tl.load(query_offsets + b + 1) - offset
    t0 = (block - (offset // TOKENS + b)) * TOKENS
    if (t0 >= extend) | (extend <= few):
        return

    rows = tl.arange(0, BLOCK_M)
    token = t0 + rows // PACK
    heads = head_id * PACK + rows % PACK
    kv_head = (head_id * PACK) // GROUP
    valid = (token < extend) & (rows < TOKENS * PACK)
    token = tl.where(valid, token, -1)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    in_d = (offs_d < D)[None, :]
    in_dv = (offs_dv < DV)[None, :]
    row = (offset + tl.maximum(token, 0)).to(tl.int64)
    query = tl.load(
        q + row[:, None] * q_t + heads[:, None] * q_h + offs_d[None, :], mask=valid[:, None] & in_d, other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    prefix = tl.load(prefix_lens + b)
    seq_len = prefix + extend
    q_pos = prefix + token
    if HAS_POSITIONS:
        q_pos = tl.load(positions + row, mask=valid, other=0).to(tl.int32)
    mask_row = cells
    if HAS_MASK:
        mask_row = cells + tl.load(mask_indptr + b)

    m = tl.full([BLOCK_M], -1.0e38, tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Keys that any row of this block may see end here (causal: at its last token).
    key_offset = tl.load(key_offsets + b)
    last = tl.load(key_offsets + b + 1) - key_offset
    if CAUSAL and not HAS_MASK:
        last = tl.minimum(t0 + TOKENS, last)
    # ... and begin here. With positions of the caller's own, only the request's bound is known.
    earliest = 0
    if HAS_WINDOW:
        earliest = prefix - window + 1
        if not HAS_POSITIONS:
            earliest += t0

    if POOL:
        start = tl.load(kv_start + b)
        end = tl.load(pool_lens + b)
        if (CAUSAL and not HAS_MASK) and not DIRECT:  # Triton 3.2 takes no chain of three
            end = tl.minimum(end, prefix + last)
        if HAS_WINDOW:
            start += tl.maximum(earliest - start, 0) // SUB * SUB
        lower = start
        if ANCHOR:
            start = start // BLOCK_N * BLOCK_N
        table = source + tl.load(req_rows + b) * source_row
        k_base = k_cache + kv_head.to(tl.int64) * k_head
        v_base = v_cache + kv_head.to(tl.int64) * v_head
        logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)
        base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634
        # Every row sees the columns from `whole` to `full`.
        full = end
        last_column = end - 1
        if CAUSAL and not DIRECT:
            full = tl.minimum(end, prefix + t0 + 1)
            last_column = tl.minimum(last_column, prefix + token)[:, None]
        whole = lower
        first_column = lower
        if HAS_WINDOW:
            whole = tl.maximum(lower, prefix + tl.minimum(t0 + TOKENS, extend) - window)
            first_column = tl.maximum(lower, prefix + token - window + 1)[:, None]
        entry = tl.arange(0, BLOCK_N // SUB) * SUB
        ahead = table_slots(table, start + entry, start + entry < end, slot_map)
        for n in range(start, end, BLOCK_N):
            slots = ahead  # table entries of the next tile are fetched before this tile's keys
            ahead = table_slots(table, n + BLOCK_N + entry, n + BLOCK_N + entry < end, slot_map)
            column = n + offs_n
            live = column < end
            if ANCHOR:
                live = live & (column >= lower)
            k_off = page_offsets(slots, k_page, k_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
            v_off = k_off
            if not ALIKE:
                v_off = page_offsets(slots, v_page, v_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
            key = tl.load(k_base + k_off[:, None] + offs_d[None, :], mask=live[:, None] & in_d, other=0.0)
            value = tl.load(v_base + v_off[:, None] + offs_dv[None, :], mask=live[:, None] & in_dv, other=0.0)
            key = key.to(query.dtype)
            value = value.to(query.dtype)
            qk = tl.dot(query, tl.trans(key), input_precision="ieee")
            if HAS_CAP:
                qk = capped(qk, logit_scale, cap)
            # Whole tiles that every row sees skip the mask: the condition is the same for all threads.
            if RANGE:
                if (n + BLOCK_N > full) | (n < whole):
                    seen = _between(column, first_column, last_column, HAS_WINDOW or ANCHOR)
                    qk = tl.where(seen, qk, float("-inf"))
            else:
                k_pos = column
                if HAS_POSITIONS and not DIRECT:
                    new = tl.load(
                        positions + offset + column - prefix, mask=live & (column >= prefix), other=0
                    )
                    k_pos = tl.where(column >= prefix, new.to(tl.int32), column)
                seen = _seen(column, live, token, q_pos, k_pos, prefix, seq_len, window, mask_row,
                             CAUSAL and not DIRECT, HAS_MASK, HAS_WINDOW, not CAUSAL)  # fmt: skip
                qk = tl.where(seen, qk, float("-inf"))
            m, den, acc = softmax_rows(qk, value, m, den, acc, base2)
        acc = acc * tl.load(v_scale + kv_head * v_scale_h)

    if DIRECT:
        first = 0
        if HAS_WINDOW and not HAS_POSITIONS:
            first = tl.maximum(earliest - prefix, 0) // BLOCK_N * BLOCK_N
        base2_new = 1.0 if HAS_CAP else scale * 1.4426950408889634
        full_new = last
        last_new = last - 1
        if CAUSAL:
            full_new = tl.minimum(last, t0 + 1)
            last_new = tl.minimum(last_new, token)[:, None]
        whole_new = first
        first_new = first
        if HAS_WINDOW:
            whole_new = tl.minimum(t0 + TOKENS, extend) - window
            first_new = (token - window + 1)[:, None]
        k_new = k + kv_head.to(tl.int64) * k_h + key_offset.to(tl.int64) * k_t
        v_new = v + kv_head.to(tl.int64) * v_h + key_offset.to(tl.int64) * v_t
        for n in range(first, last, BLOCK_N):
            index = n + offs_n
            live = index < last
            at = index.to(tl.int64)
            key = tl.load(k_new + at[:, None] * k_t + offs_d[None, :], mask=live[:, None] & in_d, other=0.0)
            value = tl.load(
                v_new + at[:, None] * v_t + offs_dv[None, :], mask=live[:, None] & in_dv, other=0.0
            )
            key = key.to(query.dtype)
            value = value.to(query.dtype)
            qk = tl.dot(query, tl.trans(key), input_precision="ieee")
            if HAS_CAP:
                qk = capped(qk, scale, cap)
            if RANGE:
                if (n + BLOCK_N > full_new) | (n < whole_new):
                    qk = tl.where(_between(index, first_new, last_new, HAS_WINDOW), qk, float("-inf"))
            else:
                k_pos = prefix + index
                if HAS_POSITIONS:
                    k_pos = tl.load(positions + key_offset + index, mask=live, other=0).to(tl.int32)
                seen = _seen(prefix + index, live, token, q_pos, k_pos, prefix, seq_len, window, mask_row,
                             CAUSAL, HAS_MASK, HAS_WINDOW, not CAUSAL)  # fmt: skip
                qk = tl.where(seen, qk, float("-inf"))
            m, den, acc = softmax_rows(qk, value, m, den, acc, base2_new)

    acc = acc * (1.0 / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
    if HAS_SINKS:
        acc, natural = apply_sink(acc, natural, tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32))
    o_ptr = out + row[:, None] * out_t + heads[:, None] * out_h + offs_dv[None, :]
    tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=valid[:, None] & in_dv)
    if WRITE_LSE:
        tl.store(lse + row * lse_t + heads, natural, mask=valid)
