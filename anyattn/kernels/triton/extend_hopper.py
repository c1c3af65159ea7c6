"""Causal extend for Hopper, scheduled by hand (Gluon): two warps fetch, two warpgroups compute.

A program stays on its SM and works through blocks of 128 query rows. The fetching warps copy K and V by
tensor descriptors, in boxes of as many rows as lie in consecutive slots; each computing warpgroup has 64
rows and keeps two products in flight, so that the softmax of one tile runs beside the values of the last.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyattn.kernels.triton.extend_hopper_fetch import (
    count_blocks,
    fetch,
    fetch_rows,
    item_of,
    place_of,
    row_block,
    threads_meet,
)

__all__ = ["extend_hopper_kernel"]


@gluon.jit
def _softmax(s, m, den, base2):
    """One online-softmax step in base 2: `(p, m, den, factor of what was before)`."""
    new_m = gl.maximum(m, gl.max(s, 1) * base2)
    p = gl.exp2(s * base2 - gl.expand_dims(new_m, 1))
    alpha = gl.exp2(m - new_m)
    return p, new_m, den * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _computed(x):
    """x, never negative, before anything that waits: the assembler would move its computation behind the
    wait that follows, and so out of the product's shadow, if no instruction with an effect stood between.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never nanosleep.u32 1; mov.b32 $0, $1; }",
        "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _logits(s, n, last, window, scale, cap, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
            MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr):  # fmt: skip
    if HAS_CAP:
        doubled = gl.exp2(s * (scale / cap * 2.8853900817779268))
        s = (cap * 1.4426950408889634) * (1.0 - 2.0 / (doubled + 1.0))
    if MASKED:
        # Read here: comparisons made while the scores are computed would be kept as bits and unpacked.
        last = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [last - n], dtype=gl.int32, is_pure=False, pack=1
        )
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
        seen = gl.expand_dims(column, 0) <= gl.expand_dims(last, 1)
        if HAS_WINDOW:
            seen = seen & (gl.expand_dims(column, 0) > gl.expand_dims(last - window, 1))
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _steps(first, until, top, step, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
           p, m, den, acc, last, window, scale, cap, base2, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
           BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr,
           HAS_CAP: gl.constexpr):  # fmt: skip
    """Tiles `first` to `until` (0 is the last): softmax of a tile runs beside the values of the one before,
    whose weights are `p`. They are carried in float32: halves would be taken apart to carry them.
    """
    none = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    for i in range(first, until):
        now = step + i
        stage = now % STAGES
        before = (now - 1) % STAGES
        weights = gl.convert_layout(p.to(k_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(k_full.index(stage), (now // STAGES) % 2)
        scores = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((now - 1) // STAGES) % 2)
        values = warpgroup_mma(weights, v_smem.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[scores])
        threads_meet()
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _logits(
            s, (top - i) * BLOCK_N, last, window, scale, cap, S_LAYOUT, BLOCK_N, MASKED, HAS_WINDOW,
            HAS_CAP,
        )  # fmt: skip
        p, m, den, alpha = _softmax(s, m, den, base2)
        den = _computed(den)
        acc = warpgroup_mma_wait(0, deps=[values])
        threads_meet()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
    return p, m, den, acc


@gluon.jit
def _compute(out, lse, sinks, query_offsets, prefix_lens, k_scale, v_scale, out_t, out_h, lse_t,
             k_scale_h, v_scale_h, scale, cap, window, num_requests, few, num_heads,
             q_all, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
             PART: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr,
             BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SETS: gl.constexpr, PAGED: gl.constexpr,
             HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr,
             WRITE_LSE: gl.constexpr):  # fmt: skip
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ZERO_ROWS: gl.constexpr = 4096 // D
    step = 0
    begun = 0
    num_items = count_blocks(query_offsets, num_requests, few, PACK) * num_heads
    for round_ in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(round_, num_items)
        if item < num_items:
            _b, head_id, offset, row0, extend, prefix, low, end, tiles = row_block(
                item, num_items, query_offsets, prefix_lens, num_requests, few, num_heads, window,
                PACK, BLOCK_N, HAS_WINDOW,
            )  # fmt: skip
            kv_head = (head_id * PACK) // GROUP
            logit_scale = scale
            value_scale = 1.0
            if PAGED:
                logit_scale = scale * gl.load(k_scale + kv_head * k_scale_h)
                value_scale = gl.load(v_scale + kv_head * v_scale_h)
            base2 = logit_scale * 1.4426950408889634
            if HAS_CAP:
                base2 = 1.0
            s_rows = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
            s_token, s_head = place_of(row0, s_rows, PACK)
            last = gl.minimum(prefix + s_token, end - 1)
            m = gl.full([64], -1.0e38, gl.float32, gl.SliceLayout(1, S_LAYOUT))
            den = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            acc = gl.zeros([64, D], gl.float32, O_LAYOUT)

            stage = step % STAGES
            phase = (step // STAGES) % 2
            top = low + tiles - 1
            n = top * BLOCK_N
            q_at = begun % SETS
            q_smem = q_all.index(q_at * 2 + PART)
            mbarrier.wait(q_full.index(q_at), (begun // SETS) % 2)
            mbarrier.wait(k_full.index(stage), phase)
            none = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(
                q_smem, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[scores])
            threads_meet()
            mbarrier.arrive(k_empty.index(stage), count=1)
            s = _logits(s, n, last, window, logit_scale, cap, S_LAYOUT, BLOCK_N, True, HAS_WINDOW, HAS_CAP)
            p, m, den, _alpha = _softmax(s, m, den, base2)
            if prefix + extend < n + BLOCK_N:
                # Rows past the request's end are another's, or NaN, and 0 * NaN is NaN. Both warpgroups
                # write the same.
                mbarrier.wait(v_full.index(stage), phase)
                for part in gl.static_range(BLOCK_N // ZERO_ROWS):
                    piece = v_smem.index(stage).slice(part * ZERO_ROWS, ZERO_ROWS)
                    at = n + part * ZERO_ROWS + gl.arange(0, ZERO_ROWS, layout=gl.SliceLayout(1, Q_LAYOUT))
                    value = piece.load(Q_LAYOUT)
                    piece.store(gl.where(gl.expand_dims(at < prefix + extend, 1), value, 0.0))
                fence_async_shared()
                threads_meet()

            first = prefix + row0 // PACK
            whole = top + 1 - (first + 1) // BLOCK_N  # tiles from here on are seen by every row ...
            whole = gl.minimum(gl.maximum(whole, 1), tiles)
            until = tiles  # ... as long as they lie in every row's window
            if HAS_WINDOW:
                until = top + 1 - (gl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N
                until = gl.minimum(gl.maximum(until, whole), tiles)
            p, m, den, acc = _steps(
                1, whole, top, step, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                p, m, den, acc, last, window, logit_scale, cap, base2, S_LAYOUT, O_LAYOUT, BLOCK_N, STAGES,
                True, HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
            p, m, den, acc = _steps(
                whole, until, top, step, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                p, m, den, acc, last, window, logit_scale, cap, base2, S_LAYOUT, O_LAYOUT, BLOCK_N, STAGES,
                False, HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
            if HAS_WINDOW:
                p, m, den, acc = _steps(
                    until, tiles, top, step, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    p, m, den, acc, last, window, logit_scale, cap, base2, S_LAYOUT, O_LAYOUT, BLOCK_N,
                    STAGES, True, HAS_WINDOW, HAS_CAP,
                )  # fmt: skip
            step += tiles
            stage = (step - 1) % STAGES
            weights = gl.convert_layout(p.to(k_smem.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
            mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) % 2)
            values = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[values])
            threads_meet()
            mbarrier.arrive(v_empty.index(stage), count=1)

            factor = value_scale / gl.where(den == 0.0, 1.0, den)
            natural = gl.where(den == 0.0, float("-inf"), (m + gl.log2(den)) * 0.6931471805599453)
            if HAS_SINKS or WRITE_LSE:
                s_heads = head_id * PACK + s_head
                s_valid = s_token < extend
                if HAS_SINKS:
                    sink = gl.load(sinks + s_heads, mask=s_valid, other=0.0).to(gl.float32)
                    most = gl.maximum(natural, sink)
                    total = most + gl.log(gl.exp(natural - most) + gl.exp(sink - most))
                    factor = factor * gl.exp(natural - total)
                    natural = total
                if WRITE_LSE:
                    gl.store(lse + (offset + s_token).to(gl.int64) * lse_t + s_heads, natural, mask=s_valid)
            acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT)), 1)
            # Through the queries' place, which nobody needs any more, so that rows are stored whole.
            q_smem.store(acc.to(out.dtype.element_ty))
            result = q_smem.load(Q_LAYOUT)
            fence_async_shared()
            threads_meet()
            mbarrier.arrive(q_empty.index(q_at), count=1)
            begun += 1
            rows = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
            token, head = place_of(row0, rows, PACK)
            row = gl.expand_dims((offset + token).to(gl.int64), 1)
            heads = gl.expand_dims(head_id * PACK + head, 1)
            columns = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, Q_LAYOUT)), 0)
            gl.store(
                out + row * out_t + heads * out_h + columns,
                result,
                mask=gl.expand_dims(token < extend, 1),
            )


# Batches come in any size: one kernel for all, whatever divides their number.
@gluon.jit(do_not_specialize=["num_requests", "few"])
def extend_hopper_kernel(
    q, k, v, source, req_rows, query_offsets, prefix_lens, kv_start, sinks, out, lse, num_requests,
    few, slot_map, k_scale, v_scale, q_t, q_h, k_h, v_h, page_rows, head_rows, none, source_row, out_t, out_h,
    lse_t, k_scale_h, v_scale_h, scale, cap, window, num_heads,
    PAGE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, SETS: gl.constexpr, PAGED: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """As `extend_tma_kernel`, with D = Dv and a grid of any size: one program an SM.

    `q`: a descriptor of boxes `[64 / PACK, PACK, 64]`, or where PACK doesn't divide 64, the tensor. `k`, `v`:
    descriptors of boxes `[BOX, 64]`; PAGED: BOX consecutive tokens lie in consecutive slots.
    `none`: a row past the end of both matrices. SETS: blocks whose queries are there at once.
    """
    HALVES: gl.constexpr = D // 64
    BOXES: gl.constexpr = STAGES * HALVES * (BLOCK_N // BOX)
    WHOLE: gl.constexpr = 64 % PACK == 0
    dtype: gl.constexpr = k.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # A half of a set for each warpgroup.
    q_smem = gl.allocate_shared_memory(dtype, [2 * SETS, 64, D], LAYOUT)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], LAYOUT)
    k_boxes = k_smem._reinterpret(dtype, [BOXES, BOX, 64], LAYOUT)
    v_boxes = v_smem._reinterpret(dtype, [BOXES, BOX, 64], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [SETS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SETS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SETS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    threads_meet()
    if WHOLE:
        q_parts = q_smem._reinterpret(
            dtype, [2 * SETS * HALVES, 64 // PACK, PACK, 64], gl.NVMMASharedLayout(128, 16, 3)
        )
    else:
        q_parts = q_smem._reinterpret(dtype, [16 * SETS * HALVES, 8, 64], LAYOUT)
    gl.warp_specialize(
        [
            (_compute, (
                out, lse, sinks, query_offsets, prefix_lens, k_scale, v_scale, out_t, out_h, lse_t, k_scale_h,
                v_scale_h, scale, cap, window, num_requests, few, num_heads,
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                0, GROUP, PACK, D, BLOCK_N, STAGES, SETS, PAGED, HAS_WINDOW, HAS_CAP, HAS_SINKS, WRITE_LSE,
            )),
            (_compute, (
                out, lse, sinks, query_offsets, prefix_lens, k_scale, v_scale, out_t, out_h, lse_t, k_scale_h,
                v_scale_h, scale, cap, window, num_requests, few, num_heads,
                q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                1, GROUP, PACK, D, BLOCK_N, STAGES, SETS, PAGED, HAS_WINDOW, HAS_CAP, HAS_SINKS, WRITE_LSE,
            )),
            (fetch, (
                q, k, source, slot_map, req_rows, query_offsets, prefix_lens, kv_start, source_row, k_h,
                page_rows, head_rows, none, num_requests, few, num_heads, window,
                q_parts, k_boxes, q_full, q_empty, k_full, k_empty,
                WHOLE, GROUP, PACK, PAGED, PAGE, BLOCK_N, BOX, HALVES, STAGES, SETS, HAS_WINDOW,
            )),
            (fetch, (
                q, v, source, slot_map, req_rows, query_offsets, prefix_lens, kv_start, source_row, v_h,
                page_rows, head_rows, none, num_requests, few, num_heads, window,
                q_parts, v_boxes, q_full, q_empty, v_full, v_empty,
                False, GROUP, PACK, PAGED, PAGE, BLOCK_N, BOX, HALVES, STAGES, SETS, HAS_WINDOW,
            )),
            (fetch_rows, (
                q, q_t, q_h, query_offsets, prefix_lens, num_requests, few, num_heads, q_parts, q_full,
                q_empty, PACK, HALVES, SETS,
            )),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
