"""The fetching half of Hopper's extend, and the order of work that both halves follow."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

__all__ = ["count_blocks", "fetch", "fetch_rows", "item_of", "place_of", "row_block", "threads_meet"]

# Named `barrier` from Triton 3.7 on.
threads_meet = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def item_of(round_, num_items):
    """Item of this program in a round: rounds run to and fro, as items get shorter."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return round_ * programs + gl.where(round_ % 2 == 0, pid, programs - 1 - pid)


@gluon.jit
def _sum_of(a, b):
    return a + b


@gluon.jit
def _blocks_from(first, query_offsets, num_requests, few, PACK: gl.constexpr):
    """Blocks of 128 rows of each of 64 requests, none of those of up to `few` tokens; every warp has them
    all. A request's rows, PACK to a token, lie densely: a token may begin in one block and end in the next.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    request = first + gl.arange(0, 64, layout=LAYOUT)
    there = request < num_requests
    begin = gl.load(query_offsets + request, mask=there, other=0)
    end = gl.load(query_offsets + request + 1, mask=there, other=0)
    blocks = ((end - begin) * PACK + 127) // 128
    return gl.where(end - begin > few, blocks, 0)


@gluon.jit
def count_blocks(query_offsets, num_requests, few, PACK: gl.constexpr):
    """Row blocks of a step. Only those that have rows are dealt out: where requests of 64 tokens end within
    blocks of 32 that begin anywhere, programs got six items or twelve.
    """
    count = 0
    for first in range(0, num_requests, 64):
        count += gl.sum(_blocks_from(first, query_offsets, num_requests, few, PACK), 0)
    return count


@gluon.jit
def row_block(item, num_items, query_offsets, prefix_lens, num_requests, few, num_heads, window,
           PACK: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr):  # fmt: skip
    """`(request, head block, first line of q, first of its rows, tokens, prefix, first tile, last key + 1,
    tiles)` of an item.
    """
    head_id = item % num_heads
    block = (num_items - 1 - item) // num_heads
    b = 0
    before = 0  # blocks of requests in front of b
    first = 0
    while first < num_requests:
        until = before + gl.associative_scan(
            _blocks_from(first, query_offsets, num_requests, few, PACK), 0, _sum_of
        )
        passed = until <= block
        skipped = gl.sum(passed.to(gl.int32), 0)
        before = gl.max(gl.where(passed, until, before), 0)
        b = first + skipped
        first = gl.where(skipped == 64, first + 64, num_requests)
    offset = gl.load(query_offsets + b)
    extend = gl.load(query_offsets + b + 1) - offset
    row0 = (block - before) * 128
    prefix = gl.load(prefix_lens + b)
    end = prefix + gl.minimum((row0 + 127) // PACK + 1, extend)
    low = 0
    if HAS_WINDOW:
        low = gl.maximum(prefix + row0 // PACK - window + 1, 0) // BLOCK_N
    tiles = (end + BLOCK_N - 1) // BLOCK_N - low
    return b, head_id, offset, row0, extend, prefix, low, end, tiles


@gluon.jit
def place_of(row0, rows, PACK: gl.constexpr):
    """`(token, packed head)` of `rows` of the block whose first one is `row0` of its request's."""
    if 128 % PACK == 0:
        return row0 // PACK + rows // PACK, rows % PACK
    else:  # noqa: RET505
        return (row0 + rows) // PACK, (row0 + rows) % PACK


@gluon.jit
def _box_rows(table, slot_map, n, start, end, offset, page_rows, head_row, none,
              PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, COUNT: gl.constexpr):  # fmt: skip
    """First matrix rows of a tile's boxes. All entries are asked for before the first is used. Boxes in front
    of `start` aren't anybody's any more.
    """
    if not PAGED:
        return (offset + n,)
    slots = ()
    for j in gl.static_range(COUNT):
        at = n + j * BOX
        slots = slots + (gl.load(table + at, mask=(at < end) & (at + BOX > start), other=0),)  # type: ignore[assignment]  # noqa: RUF005
    if slot_map is not None:
        mapped = ()
        for j in gl.static_range(COUNT):
            mapped = mapped + (gl.load(slot_map + slots[j]),)  # type: ignore[assignment]  # noqa: RUF005
        slots = mapped
    rows = ()
    for j in gl.static_range(COUNT):
        row = (slots[j] // PAGE) * page_rows + slots[j] % PAGE + head_row
        at = n + j * BOX
        rows = rows + (gl.where((at < end) & (at + BOX > start), row, none),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _fetch_tile(desc, boxes, full, empty, stage, phase, rows, column,
                BYTES: gl.constexpr, HALVES: gl.constexpr, COUNT: gl.constexpr):  # fmt: skip
    """Copies of one tile of K or V, once its stage is free."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for j in gl.static_range(COUNT):
        for half in gl.static_range(HALVES):
            box = boxes.index((stage * HALVES + half) * COUNT + j)
            tma.async_copy_global_to_shared(desc, [rows[j], column + half * 64], full.index(stage), box)


@gluon.jit
def _fetch_queries(q, boxes, full, empty, begun, token, head,
                   ROWS: gl.constexpr, HALVES: gl.constexpr, SETS: gl.constexpr):  # fmt: skip
    """Rows of both warpgroups. Those past the request's end are another's: nothing is stored of them."""
    at = begun % SETS
    mbarrier.wait(empty.index(at), (begun // SETS) % 2 ^ 1)
    mbarrier.expect(full.index(at), 128 * HALVES * 128)
    for part in gl.static_range(2):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                q, [token + part * ROWS, head, half * 64], full.index(at),
                boxes.index((at * 2 + part) * HALVES + half),
            )  # fmt: skip


@gluon.jit
def fetch(q, matrix, source, slot_map, req_rows, query_offsets, prefix_lens, kv_start, source_row,
          head_columns, page_rows, head_rows, none, num_requests, few, num_heads, window,
          q_boxes, boxes, q_full, q_empty, full, empty,
          QUERIES: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, PAGED: gl.constexpr,
          PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HALVES: gl.constexpr,
          STAGES: gl.constexpr, SETS: gl.constexpr, HAS_WINDOW: gl.constexpr):  # fmt: skip
    """One warp's work: all tiles of K, or of V; and the queries, if asked."""
    COUNT: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = BLOCK_N * HALVES * 128
    step = 0
    begun = 0
    num_items = count_blocks(query_offsets, num_requests, few, PACK) * num_heads
    for round_ in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(round_, num_items)
        if item < num_items:
            b, head_id, offset, row0, _extend, _prefix, low, end, tiles = row_block(
                item, num_items, query_offsets, prefix_lens, num_requests, few, num_heads, window,
                PACK, BLOCK_N, HAS_WINDOW,
            )  # fmt: skip
            if QUERIES:
                _fetch_queries(
                    q, q_boxes, q_full, q_empty, begun, offset + row0 // PACK, head_id * PACK, 64 // PACK,
                    HALVES, SETS,
                )  # fmt: skip
                begun += 1
            kv_head = (head_id * PACK) // GROUP
            table = source + gl.load(req_rows + b) * source_row
            start = 0
            if PAGED and HAS_WINDOW:
                start = gl.load(kv_start + b)
            for i in range(tiles):
                rows = _box_rows(
                    table, slot_map, (low + tiles - 1 - i) * BLOCK_N, start, end, offset, page_rows,
                    kv_head * head_rows, none, PAGED, PAGE, BOX, COUNT,
                )  # fmt: skip
                _fetch_tile(
                    matrix, boxes, full, empty, step % STAGES, (step // STAGES) % 2, rows,
                    kv_head * head_columns, BYTES, HALVES, COUNT,
                )  # fmt: skip
                step += 1


@gluon.jit
def fetch_rows(q, q_t, q_h, query_offsets, prefix_lens, num_requests, few, num_heads, pieces, full, empty,
               PACK: gl.constexpr, HALVES: gl.constexpr, SETS: gl.constexpr):  # fmt: skip
    """One warp's work: queries of groups whose rows are no box, and none of others."""
    if 64 % PACK != 0:
        _all_rows(
            q, q_t, q_h, query_offsets, prefix_lens, num_requests, few, num_heads, pieces, full, empty,
            PACK, HALVES, SETS,
        )  # fmt: skip


@gluon.jit
def _all_rows(q, q_t, q_h, query_offsets, prefix_lens, num_requests, few, num_heads, pieces, full, empty,
              PACK: gl.constexpr, HALVES: gl.constexpr, SETS: gl.constexpr):  # fmt: skip
    """Of a group of 7: rows in `pieces` of eight, whichever tokens and heads they are."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    begun = 0
    num_items = count_blocks(query_offsets, num_requests, few, PACK) * num_heads
    columns = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    for round_ in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(round_, num_items)
        if item < num_items:
            _b, head_id, offset, row0, extend, _prefix, _low, _end, _tiles = row_block(
                item, num_items, query_offsets, prefix_lens, num_requests, few, num_heads, 0,
                PACK, 64, False,
            )  # fmt: skip
            at = begun % SETS
            mbarrier.wait(empty.index(at), (begun // SETS) % 2 ^ 1)
            for piece in range(16):
                rows = piece * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
                token, head = place_of(row0, rows, PACK)
                begin = (offset + token).to(gl.int64) * q_t + (head_id * PACK + head) * q_h
                for half in gl.static_range(HALVES):
                    async_copy.async_copy_global_to_shared(
                        pieces.index(((at * 2 + piece // 8) * HALVES + half) * 8 + piece % 8),
                        q + gl.expand_dims(begin, 1) + (half * 64 + columns),
                        mask=gl.expand_dims(token < extend, 1),
                    )
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            threads_meet()
            mbarrier.arrive(full.index(at), count=1)
            begun += 1
