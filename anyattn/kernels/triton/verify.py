"""Split-KV attention for a few query tokens a request: a program streams a range of keys for a block of rows.

Ranges are those of decode (`ranges.py`), new tokens and all; rows are tokens x query heads of a KV head.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
# ruff: noqa: SIM102, SIM114  (an `if` on a constexpr is decided by the compiler: not to be joined)
from __future__ import annotations

import triton
import triton.language as tl

from anyattn.kernels.triton.common import apply_sink, capped, page_offsets, table_slots
from anyattn.kernels.triton.extend import softmax_rows

__all__ = ["ALL_COLUMNS", "DRAFTS", "NO_MASK", "merge_verify_kernel", "verify_kernel"]

NO_MASK, ALL_COLUMNS, DRAFTS = 0, 1, 2
"""Values of MASK: none; cells of every column count; cells of this step's tokens do, older ones are seen."""


@triton.jit
def _own_tokens(query_offsets, b, max_new):
    """First query row of request `b`, and its tokens: none where it has more, which are another kernel's."""
    offset = tl.load(query_offsets + b)
    count = tl.load(query_offsets + b + 1) - offset
    return offset, tl.where(count > max_new, 0, count)


@triton.jit
def _seen(
    column, live, token, prefix, seq_len, q_pos, window, cells, positions,
    MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Bool `[M, N]`: columns are key indices, the window is in positions, a mask replaces the causal rule.

    `cells`, `positions`: of the request, the latter of its new tokens.
    """
    seen = live[None, :] & (token >= 0)[:, None]
    new = column >= prefix
    if MASK == 0:
        seen = seen & (column[None, :] <= prefix + token[:, None])
    else:
        asked = seen
        if MASK == 2:
            asked = seen & new[None, :]
        at = token[:, None] * seq_len + column[None, :]  # of one request: far below 2^31
        cell = tl.load(cells + at, mask=asked, other=0) != 0
        if MASK == 2:
            cell = cell | (column < prefix)[None, :]
        seen = seen & cell
    if HAS_WINDOW:
        k_pos = column
        if POSITIONS:
            own = tl.load(positions + column - prefix, mask=live & new, other=0)
            k_pos = tl.where(new, own.to(tl.int32), column)
        seen = seen & (q_pos[:, None] - k_pos[None, :] < window)
    return seen


@triton.jit
def _piece(
    b, r, at, stop, tiles, row, start, length, row0, kv_head, q, k, v, out, lse, sinks,
    q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t,
    source, part_out, part_lse, source_row, query_offsets, prefix_lens, positions, cells, mask_indptr,
    max_new, k_cache, v_cache, slot_map, k_scale, v_scale, k_page, k_row, k_head, v_page, v_row, v_head,
    k_scale_h, v_scale_h, scale, cap, window, kv_heads,
    PAGE: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIRECT: tl.constexpr, MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, UPCAST: tl.constexpr,
    HALF: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rows from `row0` on of request `b`, against its tiles `at` to `stop`: to `out` or to its pieces."""
    offset, extend = _own_tokens(query_offsets, b, max_new)
    prefix = tl.load(prefix_lens + b)
    if row0 < extend * GROUP:
        rows = row0 + tl.arange(0, BLOCK_M)
        valid = rows < extend * GROUP
        token = tl.where(valid, rows // GROUP, -1)
        heads = kv_head * GROUP + rows % GROUP
        offs_d = tl.arange(0, BLOCK_D)
        offs_dv = tl.arange(0, BLOCK_DV)
        offs_n = tl.arange(0, BLOCK_N)
        in_d = (offs_d < D)[None, :]
        in_dv = (offs_dv < DV)[None, :]
        line = (offset + tl.maximum(token, 0)).to(tl.int64)
        q_ptr = q + line[:, None] * q_t + heads[:, None] * q_h + offs_d[None, :]
        query = tl.load(q_ptr, mask=valid[:, None] & in_d, other=0.0)
        if UPCAST:
            query = query.to(tl.float32)
        if HALF:
            top = tl.maximum(tl.max(tl.abs(query.to(tl.float32)), 1), 1e-30)
            query = (query.to(tl.float32) / top[:, None]).to(tl.float16)
        seq_len = prefix + extend
        q_pos = prefix + token
        own = positions
        if POSITIONS:
            own = positions + offset
            q_pos = tl.load(own + token, mask=valid, other=0).to(tl.int32)
        mask_row = cells
        if MASK != 0:
            mask_row = cells + tl.load(mask_indptr + b)
        first_token = row0 // GROUP
        last_token = tl.minimum((row0 + BLOCK_M - 1) // GROUP, extend - 1)

        # Columns from `whole` to `full` are seen by every row; nothing from `end` on is, by any.
        end = tl.minimum(stop * UNIT, length)
        if DIRECT:
            end = tl.minimum(end, prefix - start)
        elif MASK == 0:
            end = tl.minimum(end, prefix + last_token + 1 - start)
        full = prefix
        if MASK == 0 and not DIRECT:
            full = prefix + first_token + 1
        whole = 0
        if HAS_WINDOW:
            whole = prefix + last_token - window + 1
        k_base = k_cache + kv_head.to(tl.int64) * k_head
        v_base = v_cache + kv_head.to(tl.int64) * v_head
        logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)
        base2 = 1.0 if HAS_CAP else logit_scale * 1.4426950408889634
        table = source + row.to(tl.int64) * source_row + start
        m = tl.full([BLOCK_M], -1.0e38, tl.float32)
        den = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        entry = tl.arange(0, BLOCK_N // SUB) * SUB
        lo = at * UNIT
        ahead = table_slots(table, lo + entry, lo + entry < end, slot_map)
        for n in range(lo, end, BLOCK_N):
            slots = ahead  # table entries of the next tile are fetched before this tile's keys
            ahead = table_slots(table, n + BLOCK_N + entry, n + BLOCK_N + entry < end, slot_map)
            live = n + offs_n < end
            k_off = page_offsets(slots, k_page, k_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
            v_off = k_off
            if not ALIKE:
                v_off = page_offsets(slots, v_page, v_row, PAGE, SUB, BLOCK_N, FLAT, WIDE)
            key = tl.load(k_base + k_off[:, None] + offs_d[None, :], mask=live[:, None] & in_d, other=0.0)
            value = tl.load(v_base + v_off[:, None] + offs_dv[None, :], mask=live[:, None] & in_dv, other=0.0)
            key = key.to(query.dtype)
            value = value.to(query.dtype)
            qk = tl.dot(query, tl.trans(key), input_precision="ieee")
            if HALF:
                qk *= top[:, None]
            if HAS_CAP:
                qk = capped(qk, logit_scale, cap)
            column = start + n + offs_n
            # Tiles that every row sees skip the mask: the condition is the same for all threads.
            if MASK == 1 or POSITIONS:
                seen = _seen(column, live, token, prefix, seq_len, q_pos, window, mask_row, own,
                             MASK, HAS_WINDOW, POSITIONS)  # fmt: skip
                qk = tl.where(seen, qk, float("-inf"))
            elif (start + n + BLOCK_N > full) | (n + BLOCK_N > end) | (start + n < whole):
                seen = _seen(column, live, token, prefix, seq_len, q_pos, window, mask_row, own,
                             MASK, HAS_WINDOW, POSITIONS)  # fmt: skip
                qk = tl.where(seen, qk, float("-inf"))
            m, den, acc = softmax_rows(qk, value, m, den, acc, base2)
        acc = acc * tl.load(v_scale + kv_head * v_scale_h)

        if DIRECT:
            if stop == tiles:  # whoever ends the request has its new tokens
                whole_query = query
                if HALF:  # what wasn't stored may have any size
                    whole_query = tl.load(q_ptr, mask=valid[:, None] & in_d, other=0.0)
                base2_new = 1.0 if HAS_CAP else scale * 1.4426950408889634
                k_new = k + kv_head.to(tl.int64) * k_h + offset.to(tl.int64) * k_t
                v_new = v + kv_head.to(tl.int64) * v_h + offset.to(tl.int64) * v_t
                for n in range(0, extend, BLOCK_N):
                    index = n + offs_n
                    live = index < extend
                    far = index.to(tl.int64)
                    key = tl.load(
                        k_new + far[:, None] * k_t + offs_d[None, :], mask=live[:, None] & in_d, other=0.0
                    )
                    value = tl.load(
                        v_new + far[:, None] * v_t + offs_dv[None, :], mask=live[:, None] & in_dv, other=0.0
                    )
                    key = key.to(whole_query.dtype)
                    value = value.to(whole_query.dtype)
                    qk = tl.dot(whole_query, tl.trans(key), input_precision="ieee")
                    if HAS_CAP:
                        qk = capped(qk, scale, cap)
                    seen = _seen(prefix + index, live, token, prefix, seq_len, q_pos, window, mask_row, own,
                                 MASK, HAS_WINDOW, POSITIONS)  # fmt: skip
                    qk = tl.where(seen, qk, float("-inf"))
                    m, den, acc = softmax_rows(qk, value, m, den, acc, base2_new)

        acc = acc * (1.0 / tl.where(den == 0.0, 1.0, den))[:, None]
        natural = tl.where(den == 0.0, float("-inf"), (m + tl.log2(den)) * 0.6931471805599453)
        if (at == 0) & (stop == tiles):
            if HAS_SINKS:
                sink = tl.load(sinks + heads, mask=valid, other=0.0).to(tl.float32)
                acc, natural = apply_sink(acc, natural, sink)
            o_ptr = out + line[:, None] * out_t + heads[:, None] * out_h + offs_dv[None, :]
            tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=valid[:, None] & in_dv)
            if WRITE_LSE:
                tl.store(lse + line * lse_t + heads, natural, mask=valid)
        else:
            piece = ((r + b).to(tl.int64) * kv_heads + kv_head) * (max_new * GROUP) + rows
            tl.store(part_lse + piece, natural, mask=valid)
            tl.store(part_out + piece[:, None] * DV + offs_dv[None, :], acc, mask=valid[:, None] & in_dv)


@triton.jit
def _merged(
    part_out, part_lse, line, pieces, count, rows, used,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`acc [ROWS, BLOCK_DV]` and natural `lse [ROWS]` of `rows` in `pieces` lines of `count` rows, in their
    order. Pieces are the first axis: a thread sums what it loaded.
    """
    offs_s = tl.arange(0, 16)
    offs_dv = tl.arange(0, BLOCK_DV)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for s in range(0, pieces, 16):
        place = (line + s + offs_s).to(tl.int64)[:, None] * count + rows[None, :]
        inside = (s + offs_s < pieces)[:, None] & used[None, :]
        part = tl.load(part_lse + place, mask=inside, other=float("-inf"))
        tile = tl.load(
            part_out + place[:, :, None] * DV + offs_dv[None, None, :],
            mask=inside[:, :, None] & (offs_dv < DV)[None, None, :], other=0.0,
        )  # fmt: skip
        new_m = tl.maximum(m, tl.max(part, 0))
        safe = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp(part - safe[None, :])
        alpha = tl.exp(m - safe)
        den = den * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(weight[:, :, None] * tile, 0)
        m = new_m
    acc = acc / tl.where(den == 0.0, 1.0, den)[:, None]
    return acc, tl.where(den == 0.0, float("-inf"), m + tl.log(den))


# Numbers of new tokens come in any size: one kernel for all, whatever divides them.
@triton.jit(do_not_specialize=("row_blocks", "max_new"))
def verify_kernel(
    q, k, v, out, lse, sinks, q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t,
    source, req_rows, kv_start, kv_lens, ranges, part_out, part_lse, source_row,
    query_offsets, prefix_lens, positions, cells, mask_indptr, row_blocks, max_new,
    k_cache, v_cache, slot_map, k_scale, v_scale, k_page, k_row, k_head, v_page, v_row, v_head,
    k_scale_h, v_scale_h, scale, cap, window, kv_heads,
    PAGE: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIRECT: tl.constexpr, MASK: tl.constexpr, HAS_WINDOW: tl.constexpr, POSITIONS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, UPCAST: tl.constexpr,
    HALF: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, ALIKE: tl.constexpr, UNIT: tl.constexpr,
    WALK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid `(R * row_blocks * Hkv,)`, heads fastest: they read neighbouring memory at the same time.

    `ranges int32 [R, FIELDS]`: see `ranges_kernel`, whose tiles are of UNIT keys; a request has `max_new`
    tokens at most, whose rows are `row_blocks` blocks of BLOCK_M, or nothing is done for it. What one range
    holds is written to `out`, with its sink; a piece of what several hold to row `range + request` of
    `part_out [R + B, Hkv, max_new * GROUP, DV]` and `part_lse [R + B, Hkv, max_new * GROUP]`, natural log,
    without sinks. WALK: a range may hold several requests. DIRECT: new tokens are rows of k and v, and the
    pool is read up to them. POSITIONS: those of the caller, for windows. HALF: stored 8-bit keys are
    multiplied as float16, which the chip makes of them in one instruction; a query row is brought to [-1, 1]
    for it. OVERLAP: as in `decode_kernel`.
    """
    tl.static_assert(UNIT % SUB == 0)
    if OVERLAP > 1:
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    kv_head = pid % kv_heads
    row0 = pid // kv_heads % row_blocks * BLOCK_M
    r = pid // kv_heads // row_blocks
    record = ranges + r * 16
    b = tl.load(record)
    at = tl.load(record + 1)
    left = tl.load(record + 2)
    row = tl.load(record + 4)
    start = tl.load(record + 5)
    length = tl.load(record + 6)
    if WALK:
        while left > 0:
            tiles = tl.maximum(tl.cdiv(length, UNIT), 1)
            stop = tl.minimum(left, tiles - at) + at
            _piece(
                b, r, at, stop, tiles, row, start, length, row0, kv_head, q, k, v, out, lse, sinks,
                q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t,
                source, part_out, part_lse, source_row,
                query_offsets, prefix_lens, positions, cells, mask_indptr, max_new,
                k_cache, v_cache, slot_map, k_scale, v_scale, k_page, k_row, k_head, v_page, v_row, v_head,
                k_scale_h, v_scale_h, scale, cap, window, kv_heads,
                PAGE, SUB, GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DIRECT, MASK, HAS_WINDOW,
                POSITIONS, HAS_CAP, HAS_SINKS, WRITE_LSE, UPCAST, HALF, FLAT, WIDE, ALIKE, UNIT,
            )  # fmt: skip
            left -= stop - at
            at *= 0
            b += 1
            row = tl.load(req_rows + b, mask=left > 0, other=0).to(tl.int32)
            start = tl.load(kv_start + b, mask=left > 0, other=0)
            length = tl.load(kv_lens + b, mask=left > 0, other=0)
    elif left > 0:
        tiles = tl.maximum(tl.cdiv(length, UNIT), 1)
        _piece(
            b, r, at, at + left, tiles, row, start, length, row0, kv_head, q, k, v, out, lse, sinks,
            q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t,
            source, part_out, part_lse, source_row,
            query_offsets, prefix_lens, positions, cells, mask_indptr, max_new,
            k_cache, v_cache, slot_map, k_scale, v_scale, k_page, k_row, k_head, v_page, v_row, v_head,
            k_scale_h, v_scale_h, scale, cap, window, kv_heads,
            PAGE, SUB, GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DIRECT, MASK, HAS_WINDOW,
            POSITIONS, HAS_CAP, HAS_SINKS, WRITE_LSE, UPCAST, HALF, FLAT, WIDE, ALIKE, UNIT,
        )  # fmt: skip
    if OVERLAP > 0:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=("max_new",))
def merge_verify_kernel(
    out, lse, sinks, out_t, out_h, lse_t, ranges, part_out, part_lse, query_offsets, max_new, kv_heads,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr, OVERLAP: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Grid `(R / EVERY * cdiv(Hq * max_new, ROWS),)`: range r's programs merge the request that begins in it
    and ends in a later one. EVERY: requests begin in every so manieth range alone.
    """
    rows = kv_heads * max_new * GROUP
    blocks = tl.cdiv(rows, ROWS)
    r = tl.program_id(0) // blocks * EVERY
    b = tl.load(ranges + r * 16 + 8)  # older than the kernel in front, which has waited for what it reads
    pieces = tl.load(ranges + r * 16 + 9)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if pieces > 0:
        at = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
        offset, extend = _own_tokens(query_offsets, b, max_new)
        token = at % (max_new * GROUP) // GROUP
        used = (at < rows) & (token < extend)
        heads = at // (max_new * GROUP) * GROUP + at % GROUP
        offs_dv = tl.arange(0, BLOCK_DV)
        acc, natural = _merged(part_out, part_lse, r + b, pieces, rows, at, used, DV, BLOCK_DV, ROWS)
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32)
            acc, natural = apply_sink(acc, natural, sink)
        line = (offset + token).to(tl.int64)
        o_ptr = out + line[:, None] * out_t + heads[:, None] * out_h + offs_dv[None, :]
        tl.store(o_ptr, acc.to(out.dtype.element_ty), mask=used[:, None] & (offs_dv < DV)[None, :])
        if WRITE_LSE:
            tl.store(lse + line * lse_t + heads, natural, mask=used)
