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

from anyattn.kernels.triton.mla_hopper import barrier, row_sizes, start_copy, tile_rows

__all__ = ["mla_keys_kernel"]


@gluon.jit
def mla_keys_kernel(
    q, cache, source, req_rows, kv_lens, kv_scale, out, lse, part_out, part_lse,
    q_t, q_h, c_page, c_row, source_row, out_t, out_h, lse_t, scale, num_splits, min_tiles,
    PAGE: gl.constexpr, HEADS: gl.constexpr, BLOCK_H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BLOCK_N: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr, FLAT: gl.constexpr,
    FP8: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Grid `(num_splits * head_blocks * B,)`, splits fastest. Arguments as those of `mla_decode_kernel`."""
    HEAD_BLOCKS: gl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    GROUPS: gl.constexpr = WARPS // 4
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_H // GROUPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    VECTOR: gl.constexpr = 16 if FP8 else 8
    LOADS: gl.constexpr = gl.BlockedLayout([1, VECTOR], [4, 8], [WARPS, 1], [1, 0])
    RAW: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(BLOCK_H * 2, 16, 2)
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty  # as in `mla_rows_kernel`

    pid = gl.program_id(0)
    split = pid % num_splits
    pid = pid // num_splits
    b = (pid // HEAD_BLOCKS).to(gl.int64)
    head0 = (pid % HEAD_BLOCKS) * BLOCK_H
    length = gl.load(kv_lens + b)
    per_split = gl.maximum(gl.cdiv(gl.cdiv(length, BLOCK_N), num_splits), min_tiles) * BLOCK_N
    lo = split * per_split
    hi = gl.minimum(lo + per_split, length)
    table = source + gl.load(req_rows + b) * source_row

    query = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], SHARED)
    query_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], SHARED)
    STAGES: gl.constexpr = 1 if FP8 else 2
    latents = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, RANK], SHARED)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], SHARED)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], WEIGHTS)

    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADS))
    columns = gl.arange(0, RANK, gl.SliceLayout(0, LOADS))
    rotated = gl.arange(0, ROPE, gl.SliceLayout(0, LOADS))
    base = tile_rows(table, lo, lo, hi, rows, c_page, c_row, PAGE, FLAT)
    if FP8:  # copied as they are, two tiles ahead, and converted into the one buffer that products read
        raw = gl.allocate_shared_memory(cache.dtype.element_ty, [2, BLOCK_N, RANK], RAW)
        raw_rope = gl.allocate_shared_memory(cache.dtype.element_ty, [2, BLOCK_N, ROPE], RAW)
        start_copy(cache, base, raw.index(0), raw_rope.index(0), RANK, ROPE, LOADS)
        base = tile_rows(table, lo + BLOCK_N, lo, hi, rows, c_page, c_row, PAGE, FLAT)
        start_copy(cache, base, raw.index(1), raw_rope.index(1), RANK, ROPE, LOADS)
        base = tile_rows(table, lo + 2 * BLOCK_N, lo, hi, rows, c_page, c_row, PAGE, FLAT)
    else:
        start_copy(cache, base, latents.index(0), ropes.index(0), RANK, ROPE, LOADS)
        base = tile_rows(table, lo + BLOCK_N, lo, hi, rows, c_page, c_row, PAGE, FLAT)

    head = gl.minimum(head0 + gl.arange(0, BLOCK_H, gl.SliceLayout(1, LOADS)), HEADS - 1)
    at_q = q + b * q_t + head[:, None] * q_h
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
    stage = 0
    for n in range(lo, hi, BLOCK_N):
        if FP8:
            async_copy.wait_group(1)
            barrier()
            latents.index(0).store(raw.index(stage).load(LOADS).to(dtype))
            ropes.index(0).store(raw_rope.index(stage).load(LOADS).to(dtype))
        else:
            async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        current = 0 if FP8 else stage
        latent = latents.index(current)
        s = warpgroup_mma(latent, query.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(ropes.index(current), query_rope.permute((1, 0)), s, is_async=True)
        if FP8:
            start_copy(cache, base, raw.index(stage), raw_rope.index(stage), RANK, ROPE, LOADS)
            base = tile_rows(table, n + 3 * BLOCK_N, lo, hi, rows, c_page, c_row, PAGE, FLAT)
        else:
            start_copy(cache, base, latents.index(stage ^ 1), ropes.index(stage ^ 1), RANK, ROPE, LOADS)
            base = tile_rows(table, n + 2 * BLOCK_N, lo, hi, rows, c_page, c_row, PAGE, FLAT)
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
    async_copy.wait_group(0)

    total = gl.sum(den, 0)
    natural = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * 0.6931471805599453)
    factor = stored / gl.where(total == 0.0, 1.0, total)
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(0, SUMS))[None, :]
    head_s = head0 + gl.arange(0, BLOCK_H, gl.SliceLayout(0, SCORES))
    head_o = head0 + gl.arange(0, BLOCK_H, gl.SliceLayout(0, SUMS))
    component = gl.arange(0, RANK, gl.SliceLayout(1, SUMS))[:, None]
    if SPLIT:
        slot = (b * HEADS + head_o) * num_splits + split
        used = (head_o < HEADS) & (hi > lo)
        gl.store(part_out + slot[None, :] * RANK + component, sums, mask=used[None, :])
        gl.store(part_lse + (b * HEADS + head_s) * num_splits + split, natural, mask=head_s < HEADS)
    else:
        at_o = out + b * out_t + head_o[None, :] * out_h + component
        gl.store(at_o, sums.to(out.dtype.element_ty), mask=(head_o < HEADS)[None, :])
        if WRITE_LSE:
            gl.store(lse + b * lse_t + head_s, natural, mask=head_s < HEADS)
