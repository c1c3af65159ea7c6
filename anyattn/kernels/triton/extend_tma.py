"""Causal extend through tensor descriptors (TMA), for GPUs that have them: Hopper and later.

K and V are read as rows of a matrix: new ones given as arguments, `[T, Hkv * D]`, or slots of a pool whose
page holds whole tiles. Registers that pointers would take are free for larger tiles.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink, capped
from anyattn.kernels.triton.extend import _find_request, softmax_rows

__all__ = ["extend_tma_kernel"]


@triton.jit
def _row(table, slot_map, n, key_offset, page_rows, head_row, PAGED: tl.constexpr, PAGE: tl.constexpr):
    """Row of the matrix of K or V where the tile at column n begins."""
    row = key_offset + n
    if PAGED:
        slot = tl.load(table + n)
        if slot_map is not None:
            slot = tl.load(slot_map + slot)
        row = (slot // PAGE) * page_rows + slot % PAGE + head_row
    return row


@triton.jit
def _tiles(
    m, den, acc, query, k, v, table, slot_map, low, high, first, last, end, key_offset, column_k, column_v,
    page_rows, head_row, logit_scale, cap, base2,
    PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Tiles of columns from `low` to `high`, MASKED to `first [M] .. last [M]` of each row."""
    offs_n = tl.arange(0, BLOCK_N)
    final = (high - 1) // BLOCK_N * BLOCK_N
    ahead = _row(table, slot_map, tl.minimum(low, final), key_offset, page_rows, head_row, PAGED, PAGE)
    for n in range(low, high, BLOCK_N):
        at = ahead  # the next tile's table entry is fetched before this tile's keys
        if PAGED:
            following = tl.minimum(n + BLOCK_N, final)
            ahead = _row(table, slot_map, following, key_offset, page_rows, head_row, PAGED, PAGE)
        else:
            ahead = at + BLOCK_N
        qk = tl.dot(query, k.load([at, column_k]).T)
        value = v.load([at, column_v])
        if HAS_CAP:
            qk = capped(qk, logit_scale, cap)
        if MASKED:
            column = n + offs_n
            seen = column[None, :] <= last[:, None]
            if HAS_WINDOW:
                seen = seen & (column[None, :] >= first[:, None])
            qk = tl.where(seen, qk, float("-inf"))
            # Rows past the request's end are another's, or NaN.
            value = tl.where((column < end)[:, None], value, 0.0)
        m, den, acc = softmax_rows(qk, value, m, den, acc, base2)
    return m, den, acc


# Batches come in any size: one kernel for all, whatever divides their numbers.
@triton.jit(do_not_specialize=["num_requests", "num_blocks", "few"])
def extend_tma_kernel(
    q, k, v, source, req_rows, query_offsets, prefix_lens, kv_start, sinks, out, lse,
    num_requests, num_blocks, few, slot_map, k_scale, v_scale,
    q_t, q_h, k_h, v_h, page_rows, head_rows, source_row, out_t, out_h, lse_t, k_scale_h, v_scale_h,
    scale, cap, window, num_heads,
    PAGE: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr,
):  # fmt: skip
    """As `extend_kernel` with `k`, `v` descriptors of boxes `[BLOCK_N, D]` and `[BLOCK_N, Dv]`.

    PAGED: slot s of head h is row `s // PAGE * page_rows + s % PAGE + h * head_rows`, element `h * k_h` of
    it; a tile begins at a multiple of BLOCK_N of the table's columns and lies in one page. Else requests
    have no cached tokens, and token t is row t. D and Dv are powers of two. `few`: as there.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
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
    offs_d = tl.arange(0, D)
    offs_dv = tl.arange(0, DV)
    row = (offset + token).to(tl.int64)
    query = tl.load(
        q + row[:, None] * q_t + heads[:, None] * q_h + offs_d[None, :], mask=valid[:, None], other=0.0
    )
    prefix = 0
    low = 0
    logit_scale = scale
    table = source
    if PAGED:
        prefix = tl.load(prefix_lens + b)
        low = tl.load(kv_start + b)
        logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)
        table = source + tl.load(req_rows + b) * source_row
    end = prefix + tl.minimum(t0 + TOKENS, extend)
    last = tl.minimum(prefix + token, end - 1)
    first = last
    # Every row sees the columns from `whole` to `full`.
    full = tl.maximum((prefix + t0 + 1) // BLOCK_N * BLOCK_N, 0)
    whole = low
    if HAS_WINDOW:
        first = tl.maximum(prefix + token - window + 1, low)
        whole = tl.maximum(low, end - window)
        low = tl.maximum(low, prefix + t0 - window + 1)
    low = low // BLOCK_N * BLOCK_N
    base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634

    m = tl.full([BLOCK_M], -1.0e38, tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    if HAS_WINDOW:
        masked = tl.minimum(tl.cdiv(whole, BLOCK_N) * BLOCK_N, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        m, den, acc = _tiles(
            m, den, acc, query, k, v, table, slot_map, low, masked, first, last, end, offset,
            kv_head * k_h, kv_head * v_h, page_rows, kv_head * head_rows, logit_scale, cap, base2,
            PAGED, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
        low = tl.maximum(low, masked)
        full = tl.maximum(full, low)
    m, den, acc = _tiles(
        m, den, acc, query, k, v, table, slot_map, low, full, first, last, end, offset,
        kv_head * k_h, kv_head * v_h, page_rows, kv_head * head_rows, logit_scale, cap, base2,
        PAGED, PAGE, BLOCK_N, False, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    m, den, acc = _tiles(
        m, den, acc, query, k, v, table, slot_map, full, end, first, last, end, offset,
        kv_head * k_h, kv_head * v_h, page_rows, kv_head * head_rows, logit_scale, cap, base2,
        PAGED, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    if PAGED:
        acc = acc * tl.load(v_scale + kv_head * v_scale_h)
    acc = acc * (1.0 / tl.where(den == 0.0, 1.0, den))[:, None]
    natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
    if HAS_SINKS:
        acc, natural = apply_sink(acc, natural, tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32))
    o_ptr = out + row[:, None] * out_t + heads[:, None] * out_h + offs_dv[None, :]
    tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=valid[:, None])
    if WRITE_LSE:
        tl.store(lse + row * lse_t + heads, natural, mask=valid)
