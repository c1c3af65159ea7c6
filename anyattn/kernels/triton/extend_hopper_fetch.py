"""The fetching half of Hopper's extend, and the order of work that both halves follow."""

# ruff: noqa: ANN001, ANN201, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = ["fetch", "item_of", "row_block"]


@gluon.jit
def item_of(round_, num_items):
    """Item of this program in a round: rounds run to and fro, as items get shorter."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    return round_ * programs + gl.where(round_ % 2 == 0, pid, programs - 1 - pid)


@gluon.jit
def row_block(item, query_offsets, prefix_lens, num_requests, num_blocks, num_heads,
           TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """`(request, head block, first row, first token, tokens, prefix, last key + 1, tiles)` of an item."""
    head_id = item % num_heads
    block = num_blocks - 1 - item // num_heads
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = gl.load(query_offsets + middle) // TOKENS + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    b = low - 1
    offset = gl.load(query_offsets + b)
    extend = gl.load(query_offsets + b + 1) - offset
    t0 = (block - (offset // TOKENS + b)) * TOKENS
    prefix = gl.load(prefix_lens + b)
    end = prefix + gl.minimum(t0 + TOKENS, extend)
    tiles = gl.where(t0 < extend, (end + BLOCK_N - 1) // BLOCK_N, 0)
    return b, head_id, offset, t0, extend, prefix, end, tiles


@gluon.jit
def _box_rows(table, slot_map, n, end, offset, page_rows, head_row, none,
              PAGED: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr, COUNT: gl.constexpr):  # fmt: skip
    """First matrix rows of a tile's boxes. All entries are asked for before the first is used."""
    if not PAGED:
        return (offset + n,)
    slots = ()
    for j in gl.static_range(COUNT):
        at = n + j * BOX
        slots = slots + (gl.load(table + at, mask=at < end, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    if slot_map is not None:
        mapped = ()
        for j in gl.static_range(COUNT):
            mapped = mapped + (gl.load(slot_map + slots[j]),)  # type: ignore[assignment]  # noqa: RUF005
        slots = mapped
    rows = ()
    for j in gl.static_range(COUNT):
        row = (slots[j] // PAGE) * page_rows + slots[j] % PAGE + head_row
        rows = rows + (gl.where(n + j * BOX < end, row, none),)  # type: ignore[assignment]  # noqa: RUF005
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
def _fetch_queries(q, boxes, full, empty, begun, token, head, TOKENS: gl.constexpr, HALVES: gl.constexpr):
    """Rows of both warpgroups. Those past the request's end are another's: nothing is stored of them."""
    at = begun % 2
    mbarrier.wait(empty.index(at), (begun // 2) % 2 ^ 1)
    mbarrier.expect(full.index(at), 128 * HALVES * 128)
    for part in gl.static_range(2):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                q, [token + part * (TOKENS // 2), head, half * 64], full.index(at),
                boxes.index((at * 2 + part) * HALVES + half),
            )  # fmt: skip


@gluon.jit
def fetch(q, matrix, source, slot_map, req_rows, query_offsets, prefix_lens, source_row, head_columns,
          page_rows, head_rows, none, num_requests, num_blocks, num_heads, num_items,
          q_boxes, boxes, q_full, q_empty, full, empty,
          QUERIES: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, PAGED: gl.constexpr,
          PAGE: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, HALVES: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """One warp's work: all tiles of K, or of V; and the queries, if asked."""
    TOKENS: gl.constexpr = 128 // PACK
    COUNT: gl.constexpr = BLOCK_N // BOX
    BYTES: gl.constexpr = BLOCK_N * HALVES * 128
    step = 0
    begun = 0
    for round_ in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = item_of(round_, num_items)
        if item < num_items:
            b, head_id, offset, t0, _extend, _prefix, end, tiles = row_block(
                item, query_offsets, prefix_lens, num_requests, num_blocks, num_heads, TOKENS, BLOCK_N
            )
            if QUERIES:  # noqa: SIM102
                if tiles > 0:
                    _fetch_queries(
                        q, q_boxes, q_full, q_empty, begun, offset + t0, head_id * PACK, TOKENS, HALVES
                    )
                    begun += 1
            kv_head = (head_id * PACK) // GROUP
            table = source + gl.load(req_rows + b) * source_row
            for i in range(tiles):
                rows = _box_rows(
                    table, slot_map, (tiles - 1 - i) * BLOCK_N, end, offset, page_rows, kv_head * head_rows,
                    none, PAGED, PAGE, BOX, COUNT,
                )  # fmt: skip
                _fetch_tile(
                    matrix, boxes, full, empty, step % STAGES, (step // STAGES) % 2, rows,
                    kv_head * head_columns, BYTES, HALVES, COUNT,
                )  # fmt: skip
                step += 1
