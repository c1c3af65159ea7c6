"""Latent decode on Hopper for few heads, in Gluon: keys are the rows of each product, heads its columns.

A warpgroup's product has 64 rows at least. With 16 heads as rows three quarters would be empty; 64 keys, or
64 components of the rank, fill them, and both operands are read from shared memory.
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
    first_of,
    next_tile,
    row_sizes,
)

__all__ = ["mla_keys_kernel"]


@gluon.jit
def _attend(
    q, cache, source, req_rows, kv_lens, kv_scale, query, query_rope, latents, ropes, raw, raw_rope, weights,
    slots, c_b, c_row, c_n, c_hi, c_left, stage,
    b, lo, hi, head0, q_t, q_h, c_page, c_token, source_row, scale,
    PAGE: gl.constexpr, HEADS: gl.constexpr, BLOCK_H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_N: gl.constexpr, FLAT: gl.constexpr, FP8: gl.constexpr, WARPS: gl.constexpr, WALK: gl.constexpr,
):  # fmt: skip
    """Keys `lo` to `hi` of request `b`, whose first tile is on its way: sums `[RANK, BLOCK_H]`, their
    log-sum-exp `[BLOCK_H]`; then the slots and the place of the tile to be copied next, and the stage.
    """
    GROUPS: gl.constexpr = WARPS // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_H // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    VECTOR: gl.constexpr = 16 if FP8 else 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = query.dtype

    columns = gl.arange(0, RANK, gl.SliceLayout(0, LOADS))
    rotated = gl.arange(0, ROPE, gl.SliceLayout(0, LOADS))
    head = gl.minimum(head0 + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOADS)), HEADS - 1)
    at_q = q + b.to(gl.int64) * q_t + head[:, None] * q_h
    whole = gl.load(at_q + columns[None, :])
    whole_rope = gl.load(at_q + RANK + rotated[None, :])
    if FP8:
        size = row_sizes(whole, whole_rope)
        whole = (whole.to(gl.float32) / size[:, None]).to(dtype)
        whole_rope = (whole_rope.to(gl.float32) / size[:, None]).to(dtype)
    query.store(whole)
    query_rope.store(whole_rope)

    stored = gl.load(kv_scale)
    base2 = scale * stored * 1.4426950408889634
    base2_heads = base2
    if FP8:
        base2 = base2 * gl.convert_layout(size, gl.SliceLayout(0, SCORES))
        base2_heads = base2[None, :]
    m = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, SCORES))
    den = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, SCORES)  # summed over keys at the end only
    nothing = gl.full([BLOCK_N, BLOCK_H], 0.0, gl.float32, SCORES)
    sums = gl.full([RANK, BLOCK_H], 0.0, gl.float32, SUMS)
    key = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCORES))
    for n in range(lo, hi, BLOCK_N):
        c_b, c_row, c_n, c_hi, c_left = next_tile(
            req_rows, kv_lens, c_b, c_row, c_n, c_hi, c_left, BLOCK_N, WALK
        )  # fmt: skip
        latent, rope = await_tile(latents, ropes, raw, raw_rope, stage, FP8, LOADS)
        s = warpgroup_mma(latent, query.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(rope, query_rope.permute((1, 0)), s, is_async=True)
        slots = copy_ahead(
            cache, slots, latents, ropes, raw, raw_rope, stage, source + c_row * source_row, c_n, c_hi,
            c_page, c_token, PAGE, RANK, ROPE, BLOCK_N, FLAT, FP8, LOADS,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        if n + BLOCK_N > hi:
            s = gl.where((n + key < hi)[:, None], s, float("-inf"))
        new_m = gl.maximum(m, gl.max(s, 0) * base2)
        p = gl.exp2(s * base2_heads - new_m[None, :])
        alpha = gl.exp2(m - new_m)
        m = new_m
        den = den * alpha[None, :] + p
        weights.store(p.to(dtype))
        sums = sums * gl.convert_layout(alpha, gl.SliceLayout(0, SUMS))[None, :]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(latent.permute((1, 0)), weights, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[acc])
        stage = stage ^ 1

    if not WALK:
        # The last copy is awaited by nobody. Its place is free behind the loop, and the exchange below is put
        # there: a copy that arrived late changed sums (seen on an H200: infinite outputs).
        async_copy.wait_group(0)
        barrier()
    total = gl.sum(den, 0)
    natural = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)
    factor = stored / gl.where(total == 0.0, 1.0, total)
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(0, SUMS))[None, :]
    return sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage


@gluon.jit
def _finish(
    sums, natural, b, r, whole, used, head0, out, lse, part_out, part_lse, out_t, out_h, lse_t,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, RANK: gl.constexpr, WRITE_LSE: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """To `out` where range `r` holds request `b` whole, else to its piece. Not `used`: a part without
    keys.
    """
    head_s = head0 + gl.arange(0, BLOCK_H, natural.type.layout)
    head_o = head0 + gl.arange(0, BLOCK_H, gl.SliceLayout(0, sums.type.layout))
    component = gl.arange(0, RANK, gl.SliceLayout(1, sums.type.layout))[:, None]
    if SPLIT:
        piece = (r + b).to(gl.int64) * HEADS
        part = (head_o < HEADS) & used & (whole == 0)
        gl.store(part_out + (piece + head_o)[None, :] * RANK + component, sums, mask=part[None, :])
        gl.store(part_lse + piece + head_s, natural, mask=(head_s < HEADS) & used & (whole == 0))
    at_o = out + b.to(gl.int64) * out_t + head_o[None, :] * out_h + component
    gl.store(at_o, sums.to(out.dtype.element_ty), mask=((head_o < HEADS) & whole)[None, :])
    if WRITE_LSE:
        gl.store(lse + b.to(gl.int64) * lse_t + head_s, natural, mask=(head_s < HEADS) & whole)


@gluon.jit
def mla_keys_kernel(
    q, cache, source, req_rows, kv_lens, ranges, kv_scale, out, lse, part_out, part_lse,
    q_t, q_h, c_page, c_token, source_row, out_t, out_h, lse_t, scale,
    PAGE: gl.constexpr, HEADS: gl.constexpr, BLOCK_H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_N: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr, WALK: gl.constexpr,
    FLAT: gl.constexpr, FP8: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid `(R * head_blocks,)`, heads fastest. Arguments as those of `mla_decode_kernel`."""
    HEAD_BLOCKS: gl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    VECTOR: gl.constexpr = 16 if FP8 else 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(BLOCK_H * 2, 16, 2)
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty  # as in `mla_rows_kernel`

    r = gl.program_id(0) // HEAD_BLOCKS
    head0 = gl.program_id(0) % HEAD_BLOCKS * BLOCK_H
    b, at, left, row, length = first_of(ranges, r)
    lo = at * BLOCK_N
    hi = gl.minimum((at + left) * BLOCK_N, length)
    tiles = gl.maximum(gl.cdiv(length, BLOCK_N), 1)
    c_left = left - gl.minimum(left, tiles - at)

    query = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], SHARED)
    query_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], SHARED)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], WEIGHTS)
    latents, ropes, raw, raw_rope, slots, c_b, c_row, c_n, c_hi, c_left = copy_first(
        cache, source, req_rows, kv_lens, b, row, lo - BLOCK_N, hi, c_left, source_row, c_page, c_token,
        dtype, PAGE, RANK, ROPE, BLOCK_N, WALK, FLAT, FP8, LOADS,
    )  # fmt: skip

    stage = 0
    if WALK:
        while left > 0:
            tiles = gl.maximum(gl.cdiv(length, BLOCK_N), 1)
            stop = gl.minimum(left, tiles - at) + at
            left -= stop - at
            sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage = _attend(
                q, cache, source, req_rows, kv_lens, kv_scale, query, query_rope, latents, ropes, raw,
                raw_rope, weights, slots, c_b, c_row, c_n, c_hi, c_left, stage,
                b, at * BLOCK_N, gl.minimum(stop * BLOCK_N, length), head0,
                q_t, q_h, c_page, c_token, source_row, scale,
                PAGE, HEADS, BLOCK_H, RANK, ROPE, BLOCK_N, FLAT, FP8, WARPS, WALK,
            )  # fmt: skip
            length = gl.load(kv_lens + b + 1, mask=left > 0, other=0)
            _finish(
                sums, natural, b, r, (at == 0) & (stop == tiles), True, head0, out, lse, part_out, part_lse,
                out_t, out_h, lse_t, HEADS, BLOCK_H, RANK, WRITE_LSE, SPLIT,
            )  # fmt: skip
            at *= 0
            b += 1
        async_copy.wait_group(0)
    else:
        sums, natural, slots, c_b, c_row, c_n, c_hi, c_left, stage = _attend(
            q, cache, source, req_rows, kv_lens, kv_scale, query, query_rope, latents, ropes, raw, raw_rope,
            weights, slots, c_b, c_row, c_n, c_hi, c_left, stage,
            b, lo, hi, head0, q_t, q_h, c_page, c_token, source_row, scale,
            PAGE, HEADS, BLOCK_H, RANK, ROPE, BLOCK_N, FLAT, FP8, WARPS, WALK,
        )  # fmt: skip
        _finish(
            sums, natural, b, r, (at == 0) & (left == tiles), left > 0, head0, out, lse, part_out, part_lse,
            out_t, out_h, lse_t, HEADS, BLOCK_H, RANK, WRITE_LSE, SPLIT,
        )  # fmt: skip
