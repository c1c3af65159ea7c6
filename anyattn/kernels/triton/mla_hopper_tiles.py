"""What Hopper's latent kernels share: which tiles a program reads, and how they get to shared memory."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

__all__ = [
    "await_tile",
    "barrier",
    "copy_ahead",
    "copy_first",
    "find_request",
    "first_of",
    "next_tile",
    "row_sizes",
    "start_copy",
    "thread_sums",
    "tile_slots",
]

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name until 3.6


@gluon.jit
def first_of(ranges, r):
    """Of range `r`: its first request, first tile in it, tiles; then the request's row and length."""
    record = ranges + r * 16
    return (
        gl.load(record), gl.load(record + 1), gl.load(record + 2), gl.load(record + 4).to(gl.int64),
        gl.load(record + 6),
    )  # fmt: skip


@gluon.jit
def next_tile(req_rows, kv_lens, b, row, n, hi, left, BLOCK_N: gl.constexpr, WALK: gl.constexpr):
    """The place of the tile behind the one at `n` of request `b`, which has keys up to `hi` in this range.
    WALK: where there is none, the first one of a later request that has keys; `left`: tiles of the range in
    later requests. Behind the last tile, `n` is not below `hi`.
    """
    n += BLOCK_N
    if WALK:
        while (n >= hi) & (left > 0):
            b += 1
            row = gl.load(req_rows + b)
            length = gl.load(kv_lens + b)
            taken = gl.minimum(gl.maximum(gl.cdiv(length, BLOCK_N), 1), left)
            left -= taken
            hi = gl.minimum(taken * BLOCK_N, length)
            n *= 0
    return b, row, n, hi, left


@gluon.jit
def tile_slots(table, n, hi, rows):
    """Slots of the tokens `n + rows` of a request, int32 as they were read: what is computed from them waits
    for them. Beyond `hi` the last one is repeated, so that every tile is finite and its scores need no more
    than a mask; without keys, slot 0 is.
    """
    at = gl.minimum(n + rows, hi - 1)
    return gl.load(table + at, mask=at >= 0, other=0)


@gluon.jit
def start_copy(
    cache, slots, latent, rope, c_page, c_token,
    PAGE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, FLAT: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Start copying a tile: tokens in `slots [N]` to `latent [N, RANK]`, `rope [N, ROPE]` in shared
    memory.
    """
    slots = slots.to(gl.int64)
    if FLAT:  # noqa: SIM108
        base = slots * c_token
    else:
        base = (slots // PAGE) * c_page + (slots % PAGE) * c_token
    row = cache + gl.multiple_of(base, 16)[:, None]
    columns = gl.arange(0, RANK, gl.SliceLayout(0, LOADS))
    rotated = gl.arange(0, ROPE, gl.SliceLayout(0, LOADS))
    async_copy.async_copy_global_to_shared(latent, row + columns[None, :])
    async_copy.async_copy_global_to_shared(rope, row + RANK + rotated[None, :])
    async_copy.commit_group()


@gluon.jit
def copy_first(
    cache, source, req_rows, kv_lens, b, row, n, hi, left, source_row, c_page, c_token,
    dtype: gl.constexpr, PAGE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr,
    WALK: gl.constexpr, FLAT: gl.constexpr, FP8: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Buffers of tiles, `latents [.., N, RANK]` and `ropes`, and the first tile, behind `n`, on its way.

    8-bit latents are copied as they are to `raw` and `raw_rope`, two tiles ahead, and converted into the one
    buffer that products read. Then the slots and the place of the tile to be copied next, as `next_tile`.
    """
    RAW: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = 1 if FP8 else 2
    latents = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, RANK], SHARED)
    ropes = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], SHARED)
    raw = latents
    raw_rope = ropes
    if FP8:
        raw = gl.allocate_shared_memory(cache.dtype.element_ty, [2, BLOCK_N, RANK], RAW)
        raw_rope = gl.allocate_shared_memory(cache.dtype.element_ty, [2, BLOCK_N, ROPE], RAW)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADS))
    b, row, n, hi, left = next_tile(req_rows, kv_lens, b, row, n, hi, left, BLOCK_N, WALK)
    slots = tile_slots(source + row * source_row, n, hi, rows)
    for i in gl.static_range(2 if FP8 else 1):
        start_copy(
            cache, slots, raw.index(i), raw_rope.index(i), c_page, c_token, PAGE, RANK, ROPE, FLAT, LOADS
        )
        b, row, n, hi, left = next_tile(req_rows, kv_lens, b, row, n, hi, left, BLOCK_N, WALK)
        slots = tile_slots(source + row * source_row, n, hi, rows)
    return latents, ropes, raw, raw_rope, slots, b, row, n, hi, left


@gluon.jit
def await_tile(latents, ropes, raw, raw_rope, stage, FP8: gl.constexpr, LOADS: gl.constexpr):
    """The tile copied to `stage`, where products may read it: `(latent [N, RANK], rope [N, ROPE])`."""
    if FP8:
        async_copy.wait_group(1)
        barrier()
        latents.index(0).store(raw.index(stage).load(LOADS).to(latents.dtype))
        ropes.index(0).store(raw_rope.index(stage).load(LOADS).to(latents.dtype))
    else:
        async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    current = 0 if FP8 else stage
    return latents.index(current), ropes.index(current)


@gluon.jit
def copy_ahead(
    cache, slots, latents, ropes, raw, raw_rope, stage, table, n, hi, c_page, c_token,
    PAGE: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, FLAT: gl.constexpr,
    FP8: gl.constexpr, LOADS: gl.constexpr,
):  # fmt: skip
    """Start copying the tile in `slots` to the place that is free while `stage` is read; then the slots of
    the one behind, at `n` of `table`.
    """
    if FP8:
        start_copy(
            cache, slots, raw.index(stage), raw_rope.index(stage),
            c_page, c_token, PAGE, RANK, ROPE, FLAT, LOADS,
        )  # fmt: skip
    else:
        start_copy(
            cache, slots, latents.index(stage ^ 1), ropes.index(stage ^ 1),
            c_page, c_token, PAGE, RANK, ROPE, FLAT, LOADS,
        )  # fmt: skip
    return tile_slots(table, n, hi, gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADS)))


@gluon.jit
def row_sizes(latent, rope):
    """The largest magnitude of each row of `[M, RANK]` and `[M, ROPE]`, 1 where there is none."""
    size = gl.maximum(gl.max(gl.abs(latent.to(gl.float32)), 1), gl.max(gl.abs(rope.to(gl.float32)), 1))
    return gl.where(size == 0.0, 1.0, size)


@gluon.jit
def find_request(query_offsets, block, num_requests, TOKENS: gl.constexpr):
    """As in `extend`: request i owns row blocks from `offset_i // TOKENS + i` on."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = gl.load(query_offsets + middle) // TOKENS + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def thread_sums(p):
    """Sums over the columns of `p [M, N]` that a thread has, as `[M, 2, 4]`: two warpgroups of four lanes."""
    parts = gl.reshape(p, [p.shape[0], 2, p.shape[1] // 16, 4, 2])
    return gl.sum(gl.sum(parts, 4), 2)
