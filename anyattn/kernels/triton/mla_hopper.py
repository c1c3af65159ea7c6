"""Latent attention on Hopper in Gluon: blocks of 64 query rows, computed by two warpgroups.

A block has 64 x 512 sums, half of the registers of an SM, and Triton's own schedule lets both warpgroups
compute the same scores. Here each has half of a tile's keys for the scores and half of the rank for the sums;
the next tile is copied meanwhile.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyattn.kernels.triton.mla_hopper_tiles import (
    await_tile,
    barrier,
    copy_ahead,
    copy_first,
    find_request,
    first_of,
    next_tile,
    row_sizes,
    thread_sums,
)

__all__ = ["mla_rows_kernel"]


@gluon.jit
def _attend(
    q, cache, source, req_rows, seq_lens, cells, mask_indptr, kv_scale,
    query_b, query_c, query_ropes, latents, ropes, raw, raw_rope, weights,
    slots, c_b, c_row, c_n, c_hi, c_left, stage,
    b, offset, extend, t0, prefix, head0, lo, hi, q_t, q_h, c_page, c_token, source_row, scale,
    PAGE: gl.constexpr, PACK: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_MASK: gl.constexpr, FLAT: gl.constexpr, FP8: gl.constexpr, WARPS: gl.constexpr, HELD: gl.constexpr,
    WALK: gl.constexpr,
):  # fmt: skip
    """Keys `lo` to `hi` of a block of request `b`, whose first tile is on its way: sums `[64, RANK]`, their
    log-sum-exp `[64]`; then the slots and the place of the tile to be copied next, and the stage.
    """
    BLOCK_M: gl.constexpr = 64
    GROUPS: gl.constexpr = WARPS // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_N // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, RANK // GROUPS, 16])
    VECTOR: gl.constexpr = 16 if FP8 else 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(  # `[M, 2]`: what both warpgroups found, in one thread
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]
    )  # fmt: skip
    dtype: gl.constexpr = latents.dtype
    seq_len = prefix + extend
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOADS))
    token = gl.minimum(t0 + row // PACK, extend - 1)
    at_q = q + (offset + token).to(gl.int64)[:, None] * q_t + (head0 + row % PACK)[:, None] * q_h
    if HELD:
        query_b.store(gl.load(at_q + 128 + gl.arange(0, 128, gl.SliceLayout(0, LOADS))[None, :]))
        query_c.store(gl.load(at_q + 256 + gl.arange(0, 256, gl.SliceLayout(0, LOADS))[None, :]))
        row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LEFT))
        token = gl.minimum(t0 + row // PACK, extend - 1)
        at_l = q + (offset + token).to(gl.int64)[:, None] * q_t + (head0 + row % PACK)[:, None] * q_h
        query_a = gl.load(at_l + gl.arange(0, 128, gl.SliceLayout(0, LEFT))[None, :])
        query_rope = gl.load(at_l + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LEFT))[None, :])
    else:
        whole = gl.load(at_q + gl.arange(0, RANK, gl.SliceLayout(0, LOADS))[None, :])
        whole_rope = gl.load(at_q + RANK + gl.arange(0, ROPE, gl.SliceLayout(0, LOADS))[None, :])
        if FP8:
            size = row_sizes(whole, whole_rope)
            whole = (whole.to(gl.float32) / size[:, None]).to(dtype)
            whole_rope = (whole_rope.to(gl.float32) / size[:, None]).to(dtype)
        query_c.store(whole)
        query_ropes.store(whole_rope)

    row = gl.arange(0, BLOCK_M, ROWS)
    token = t0 + row // PACK
    seen = prefix + token + 1  # keys that a row sees
    limit = gl.minimum(prefix + t0 + 1, hi)  # keys that every row sees
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    mask_row = cells
    if HAS_MASK:
        token = gl.minimum(token, extend - 1)
        mask_row = cells + gl.load(mask_indptr + b) + token.to(gl.int64) * seq_len
    stored = gl.load(kv_scale)
    base2 = scale * stored * 1.4426950408889634
    base2_rows = base2
    if FP8:
        base2 = base2 * gl.convert_layout(size, ROWS)
        base2_rows = base2[:, None]
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, ROWS)
    nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORES)
    den = thread_sums(nothing)  # summed over threads at the end only
    SPREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, den.type.layout))
    sums = gl.full([BLOCK_M, RANK], 0.0, gl.float32, SUMS)
    for n in range(lo, hi, BLOCK_N):
        c_b, c_row, c_n, c_hi, c_left = next_tile(
            req_rows, seq_lens, c_b, c_row, c_n, c_hi, c_left, BLOCK_N, WALK
        )  # fmt: skip
        latent, rope = await_tile(latents, ropes, raw, raw_rope, stage, FP8, LOADS)
        rope = rope.permute((1, 0))
        if HELD:
            s = warpgroup_mma(query_rope, rope, nothing, use_acc=False, is_async=True)
            s = warpgroup_mma(query_a, latent.slice(0, 128, 1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(query_b, latent.slice(128, 128, 1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(query_c, latent.slice(256, 256, 1).permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(query_ropes, rope, nothing, use_acc=False, is_async=True)
            s = warpgroup_mma(query_c, latent.permute((1, 0)), s, is_async=True)
        slots = copy_ahead(
            cache, slots, latents, ropes, raw, raw_rope, stage, source + c_row * source_row, c_n, c_hi,
            c_page, c_token, PAGE, RANK, ROPE, BLOCK_N, FLAT, FP8, LOADS,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        if HAS_MASK:
            inside = (n + key < hi)[None, :]
            cell = gl.load(mask_row[:, None] + (n + key)[None, :], mask=inside, other=0)
            s = gl.where(inside & (cell != 0), s, float("-inf"))
        else:
            if n + BLOCK_N > limit:
                column = (n + key)[None, :]
                s = gl.where((column < hi) & (column < seen[:, None]), s, float("-inf"))
        halves = gl.max(gl.reshape(s, [BLOCK_M, 2, BLOCK_N // 2]), 2)
        peak = gl.max(gl.convert_layout(halves, PAIRS), 1)
        new_m = gl.maximum(m, gl.convert_layout(peak, ROWS) * base2)
        safe = gl.where(new_m == float("-inf"), 0.0, new_m)
        p = gl.exp2(s * base2_rows - safe[:, None])
        alpha = gl.exp2(m - safe)
        m = new_m
        den = den * gl.convert_layout(alpha, SPREAD)[:, None, None] + thread_sums(p)
        weights.store(p.to(dtype))
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, SUMS))[:, None]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(weights, latent, sums, is_async=True)
        # Waited for here: where it stays open over the loop's end, ptxas serialises all products (C7514).
        sums = warpgroup_mma_wait(0, deps=[acc])
        stage = stage ^ 1

    if not WALK:
        # The last copy is awaited by nobody. Its place is free behind the loop, and the exchange below is put
        # there: a copy that arrived late changed sums (seen on an H200: infinite outputs).
        async_copy.wait_group(0)
        barrier()
    total = gl.convert_layout(gl.sum(gl.sum(den, 2), 1), ROWS)
    natural = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)
    factor = stored / gl.where(total == 0.0, 1.0, total)
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
    return sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage


@gluon.jit
def _finish(
    sums, natural, offset, t0, extend, head0, pieces, piece, whole, used, out, lse, part_out, part_lse,
    out_t, out_h, lse_t,
    HEADS: gl.constexpr, PACK: gl.constexpr, RANK: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """To `out` where a block is `whole`, else to row `(token * HEADS + head) * pieces + piece` of the
    partials; not `used`: there were no keys, and nobody reads the sums.
    """
    BLOCK_M: gl.constexpr = 64
    TOKENS: gl.constexpr = BLOCK_M // PACK
    row_s = gl.arange(0, BLOCK_M, natural.type.layout)
    row_o = gl.arange(0, BLOCK_M, gl.SliceLayout(1, sums.type.layout))
    valid_s = (t0 + row_s // PACK < extend) & (row_s < TOKENS * PACK)
    valid_o = (t0 + row_o // PACK < extend) & (row_o < TOKENS * PACK)
    token_s = (offset + t0 + row_s // PACK).to(gl.int64)
    token_o = (offset + t0 + row_o // PACK).to(gl.int64)
    head_s = head0 + row_s % PACK
    head_o = head0 + row_o % PACK
    column_o = gl.arange(0, RANK, gl.SliceLayout(0, sums.type.layout))
    if SPLIT:
        slot = (token_o * HEADS + head_o) * pieces + piece
        part = valid_o & used & (whole == 0)
        gl.store(part_out + slot[:, None] * RANK + column_o[None, :], sums, mask=part[:, None])
        slot = (token_s * HEADS + head_s) * pieces + piece
        gl.store(part_lse + slot, natural, mask=valid_s & (whole == 0))
    at_o = out + token_o[:, None] * out_t + head_o[:, None] * out_h + column_o[None, :]
    gl.store(at_o, sums.to(out.dtype.element_ty), mask=(valid_o & whole)[:, None])
    if WRITE_LSE:
        gl.store(lse + token_s * lse_t + head_s, natural, mask=valid_s & whole)


@gluon.jit
def mla_rows_kernel(
    q, cache, source, req_rows, seq_lens, query_offsets, prefix_lens, cells, mask_indptr, ranges, kv_scale,
    out, lse, part_out, part_lse,
    q_t, q_h, c_page, c_token, source_row, out_t, out_h, lse_t,
    scale, num_requests, num_blocks, num_splits, min_tiles,
    PAGE: gl.constexpr, HEADS: gl.constexpr, PACK: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_N: gl.constexpr, DECODE: gl.constexpr, HAS_MASK: gl.constexpr, WRITE_LSE: gl.constexpr,
    SPLIT: gl.constexpr, WALK: gl.constexpr, FLAT: gl.constexpr, FP8: gl.constexpr, WARPS: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """Grid `(num_splits * HEADS / PACK * num_blocks,)`, splits fastest, late row blocks (the longest) first.

    RANK is 512. PACK heads of a token are rows of one block of `64 // PACK` tokens, as in
    `mla_extend_kernel`. HELD: a part of the queries stays in registers, which spares shared memory, whose
    bandwidth bounds the scores. Partials: `part_out [T, HEADS, S, RANK]`, `part_lse [T, HEADS, S]`, natural
    log. DECODE: requests of one token are dealt out; grid, ranges, WALK and partials as in
    `mla_decode_kernel`.
    """
    BLOCK_M: gl.constexpr = 64
    TOKENS: gl.constexpr = BLOCK_M // PACK
    HEAD_BLOCKS: gl.constexpr = HEADS // PACK
    VECTOR: gl.constexpr = 16 if FP8 else 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Two values of 8 bits become fp16 in one instruction, bf16 in several; rows of queries are scaled to fit.
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty

    pid = gl.program_id(0)
    if DECODE:
        piece = pid // HEAD_BLOCKS
        head0 = pid % HEAD_BLOCKS * PACK
        b, at, left, row, length = first_of(ranges, piece)
        tiles = gl.maximum(gl.cdiv(length, BLOCK_N), 1)
        lo = at * BLOCK_N
        hi = gl.minimum((at + left) * BLOCK_N, length)
        c_left = left - gl.minimum(left, tiles - at)
    else:
        piece = pid % num_splits
        pid = pid // num_splits
        head0 = pid % HEAD_BLOCKS * PACK
        block = num_blocks - 1 - pid // HEAD_BLOCKS
        b = find_request(query_offsets, block, num_requests, TOKENS)
        offset = gl.load(query_offsets + b)
        extend = gl.load(query_offsets + b + 1) - offset
        t0 = (block - (offset // TOKENS + b)) * TOKENS
        if t0 >= extend:
            return
        prefix = gl.load(prefix_lens + b)
        end = prefix + extend
        if not HAS_MASK:  # the last key that a row of this block sees
            end = gl.minimum(prefix + t0 + TOKENS, end)
        per_split = gl.maximum(gl.cdiv(gl.cdiv(end, BLOCK_N), num_splits), min_tiles) * BLOCK_N
        lo = piece * per_split
        hi = gl.minimum(lo + per_split, end)
        row = gl.load(req_rows + b)
        c_left = b * 0

    latents, ropes, raw, raw_rope, slots, c_b, c_row, c_n, c_hi, c_left = copy_first(
        cache, source, req_rows, seq_lens, b, row, lo - BLOCK_N, hi, c_left, source_row, c_page, c_token,
        dtype, PAGE, RANK, ROPE, BLOCK_N, WALK, FLAT, FP8, LOADS,
    )  # fmt: skip
    weights = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], SHARED)
    # HELD: columns 128 to 256 and the rest, of which those before and the rope part aren't here.
    query_b = weights
    query_ropes = weights
    if HELD:
        query_b = gl.allocate_shared_memory(dtype, [BLOCK_M, 128], SHARED)
        query_c = gl.allocate_shared_memory(dtype, [BLOCK_M, 256], SHARED)
    else:
        query_c = gl.allocate_shared_memory(dtype, [BLOCK_M, RANK], SHARED)
        query_ropes = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE], SHARED)

    stage = 0
    if WALK:
        while left > 0:
            tiles = gl.maximum(gl.cdiv(length, BLOCK_N), 1)
            stop = gl.minimum(left, tiles - at) + at
            left -= stop - at
            sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage = _attend(
                q, cache, source, req_rows, seq_lens, cells, mask_indptr, kv_scale,
                query_b, query_c, query_ropes, latents, ropes, raw, raw_rope, weights,
                slots, c_b, c_row, c_n, c_hi, c_left, stage,
                b, b, 1, 0, length - 1, head0, at * BLOCK_N, gl.minimum(stop * BLOCK_N, length),
                q_t, q_h, c_page, c_token, source_row, scale,
                PAGE, PACK, RANK, ROPE, BLOCK_N, HAS_MASK, FLAT, FP8, WARPS, HELD, WALK,
            )  # fmt: skip
            length = gl.load(seq_lens + b + 1, mask=left > 0, other=0)
            _finish(
                sums, natural, b, 0, 1, head0, 1, piece.to(gl.int64) * HEADS, (at == 0) & (stop == tiles),
                True, out, lse, part_out, part_lse, out_t, out_h, lse_t, HEADS, PACK, RANK, WRITE_LSE, SPLIT,
            )  # fmt: skip
            at *= 0
            b += 1
        async_copy.wait_group(0)
    else:
        if DECODE:
            offset = b
            extend = 1
            t0 = 0
            prefix = length - 1
            whole = (at == 0) & (left == tiles)
            pieces = 1
            piece = piece.to(gl.int64) * HEADS
        else:
            whole = not SPLIT
            pieces = num_splits
        sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage = _attend(
            q, cache, source, req_rows, seq_lens, cells, mask_indptr, kv_scale,
            query_b, query_c, query_ropes, latents, ropes, raw, raw_rope, weights,
            slots, c_b, c_row, c_n, c_hi, c_left, stage,
            b, offset, extend, t0, prefix, head0, lo, hi, q_t, q_h, c_page, c_token, source_row, scale,
            PAGE, PACK, RANK, ROPE, BLOCK_N, HAS_MASK, FLAT, FP8, WARPS, HELD, WALK,
        )  # fmt: skip
        _finish(
            sums, natural, offset, t0, extend, head0, pieces, piece, whole, hi > lo,
            out, lse, part_out, part_lse, out_t, out_h, lse_t, HEADS, PACK, RANK, WRITE_LSE, SPLIT,
        )  # fmt: skip
