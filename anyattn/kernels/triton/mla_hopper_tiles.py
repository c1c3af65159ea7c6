"""What Hopper's latent kernels share: which tiles a program reads, and how they get to shared memory."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

__all__ = [
    "barrier",
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
