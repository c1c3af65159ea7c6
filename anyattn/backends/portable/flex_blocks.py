"""What FlexAttention is told about a step: queries in tiles, and the blocks of keys that each tile reads.

A tile holds query rows of one request alone, so that a page that two requests share is listed once in each.
Tiles are the batch axis of the kernel; keys have one too (gathered), or none (the pool itself).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anyattn.core.spec import AttentionKind

__all__ = ["Blocks", "Keys", "MaskMod", "Tiles", "block_lists", "mask_mod", "pages_at", "tile_queries"]

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(batch, head, query row, key column) -> visible`, as FlexAttention calls it."""

_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Where query tokens `[T]` stand in tiles `[N, rows]`.

    Attributes:
        request: int64 `[N]`, whose rows a tile holds.
        first: int32 `[N]`, the tile's first row as an index among the request's new tokens.
        count: int32 `[N]`, rows in use; those behind repeat the last one.
        pack: int64 `[N * rows]`, token of each row; unpack: int64 `[T]`, row of each token. Both None where
            tile i is token i alone.
    """

    rows: int
    request: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    pack: torch.Tensor | None = None
    unpack: torch.Tensor | None = None

    def split(self, x: torch.Tensor, columns: slice = _ALL) -> torch.Tensor:
        """`[T, H, D]` as `[N, rows, H, D]`, or some columns of the rows."""
        if self.pack is None:
            return x[:, None]
        pack = self.pack.view(-1, self.rows)[:, columns]
        return x.index_select(0, pack.reshape(-1)).view(*pack.shape, *x.shape[1:])

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, rows, ...]` as `[T, ...]`."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.unpack is None else flat.index_select(0, self.unpack)


def tile_queries(
    extend_lens: list[int], num_tokens: int, rows: int, device: torch.device, *, one_each: bool,
    least: int = 1,
) -> Tiles:  # fmt: skip
    """Tiles of `rows` from host lengths; `one_each`: exactly one a request, however few rows it has.

    `least`: tiles at least, the rest without rows.
    """
    lens = torch.tensor(extend_lens, dtype=torch.int64)
    counts = torch.ones_like(lens) if one_each else (lens + (rows - 1)) // rows
    request = torch.repeat_interleave(torch.arange(lens.shape[0]), counts)
    index = torch.arange(request.shape[0]) - (counts.cumsum(0) - counts)[request]
    first = index * rows
    count = (lens[request] - first).clamp_(0, rows)
    spare = (0, max(0, least - request.shape[0]))
    request, first, count = (torch.nn.functional.pad(x, spare) for x in (request, first, count))
    start = (lens.cumsum(0) - lens)[request] + first
    row = torch.minimum(torch.arange(rows)[None, :], (count - 1).clamp_min(0)[:, None])
    pack = (start[:, None] + row).clamp_max_(num_tokens - 1).view(-1)
    live = (torch.arange(rows)[None, :] < count[:, None]).view(-1)
    unpack = torch.zeros(num_tokens, dtype=torch.int64)
    unpack[pack[live]] = live.nonzero()[:, 0]
    parts = (request, first.int(), count.int(), pack, unpack)
    return Tiles(rows, *(x.to(device, non_blocking=True) for x in parts))


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of one plan group as its tiles see them.

    Attributes:
        start, end: int32 `[B]`, positions of the first listed key and of the end.
        page: keys of a block of the kernel.
        table: int32 `[B, W]` pages of the pool, or None: keys are gathered, a column is a key.
        pages: int32 `[B or more, pages of the pool]`, the page's place in the request (0, 1, …), -1 where it
            isn't one of its own.
        blocks: blocks of a request at most.
    """

    start: torch.Tensor
    end: torch.Tensor
    page: int
    blocks: int
    table: torch.Tensor | None = None
    pages: torch.Tensor | None = None


def pages_at(
    table: torch.Tensor, start: torch.Tensor, lens: torch.Tensor, page: int, num_pages: int
) -> torch.Tensor:
    """`Keys.pages` from a block table `[B, W]`: the inverse of each of its rows."""
    column = torch.arange(table.shape[1], device=table.device, dtype=torch.int32)[None, :]
    live = column < ((lens + (page - 1)) // page)[:, None]
    place = torch.where(live, column + (start // page)[:, None], torch.full_like(column, -1))
    # Cells behind a request's last page go to a column of their own, one past the pool's.
    target = torch.where(live, table, torch.full_like(table, num_pages)).long()
    rows = max(2, table.shape[0])  # a table of one row would make a kernel of its own
    pages = torch.full((rows, num_pages + 1), -1, dtype=torch.int32, device=table.device)
    return pages.scatter_(1, target, place)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Arguments of a `BlockMask`: lists `[N, 1, R]` and `[N, 1, R, W]` of blocks with and without a mask."""

    partial: tuple[torch.Tensor, torch.Tensor]
    full: tuple[torch.Tensor, torch.Tensor]
    mask_mod: MaskMod


def block_lists(
    tiles: Tiles, prefix: torch.Tensor, keys: Keys, kind: AttentionKind, window: int | None, q_block: int,
    heads: int = 1,
) -> Blocks:  # fmt: skip
    """Blocks that some row of a tile sees (`partial`), and those that all of them see whole (`full`).

    Rows of the tables are spans of `q_block` query rows; at least two of each axis, so that shapes of one
    don't make kernels of their own. Tiles without rows list nothing. `heads`: as in `mask_mod`.
    """
    spans = max(2, -(-tiles.rows // q_block))
    offset = torch.arange(spans, device=prefix.device, dtype=torch.int32)[None, :] * q_block
    last = (tiles.count - 1).clamp_min(0)[:, None]
    base = (prefix[tiles.request] + tiles.first)[:, None]
    low = base + torch.minimum(offset, last)
    high = base + torch.minimum(offset + (q_block - 1), last)
    start, end = (x[tiles.request][:, None].expand_as(low) for x in (keys.start, keys.end))
    causal = kind is AttentionKind.CAUSAL
    stop = torch.minimum(end, high + 1) if causal else end
    whole = torch.minimum(end, low + 1) if causal else end
    begin = start if window is None else torch.maximum(start, low - (window - 1))
    if window is not None and not causal:
        stop = torch.minimum(end, high + window)
    first = torch.div(begin - start, keys.page, rounding_mode="floor")
    after = torch.div((stop - start).clamp_min(0) + (keys.page - 1), keys.page, rounding_mode="floor")
    full = torch.div((whole - start).clamp_min(0), keys.page, rounding_mode="floor")
    full = full if window is None else torch.zeros_like(full)
    partial_from = torch.maximum(first, full)
    column = torch.arange(max(2, keys.blocks), device=prefix.device)[None, None, :]
    listed = (partial_from[..., None] + column).clamp_max_(max(0, keys.blocks - 1))
    entries = column.expand_as(listed)
    if keys.table is not None:
        rows = tiles.request[:, None, None]
        listed, entries = keys.table[rows, listed], keys.table[rows, entries.clamp_max(keys.blocks - 1)]
    used = (tiles.count > 0)[:, None]
    return Blocks(
        _lists((after - partial_from).clamp_min(0) * used, listed),
        _lists(full * used, entries),
        mask_mod(tiles, prefix, keys, kind, window, heads),
    )


def _lists(counts: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return counts.int()[:, None], entries.int()[:, None].contiguous()


def mask_mod(
    tiles: Tiles, prefix: torch.Tensor, keys: Keys, kind: AttentionKind, window: int | None, heads: int = 1
) -> MaskMod:
    """Visibility as two positions of each row, the first key seen and the end: causal k <= p, window
    p - k < W (bidirectional: |p - k| < W). One function for all: a number in it would be a kernel of its own.

    `heads`: rows that a tile of one token has, the heads of a group.
    """
    row = torch.arange(tiles.rows, device=prefix.device, dtype=torch.int32)[None, :]
    last = (tiles.count - 1).clamp_min(0)[:, None]
    position = (prefix[tiles.request] + tiles.first)[:, None] + torch.minimum(row, last)
    if tiles.pack is None:
        position = position.expand(-1, heads)
    start, end = (x[tiles.request][:, None] for x in (keys.start, keys.end))
    low = torch.zeros_like(position) if window is None else position - (window - 1)
    low = torch.maximum(low, start)
    high = end.expand_as(position)
    if kind is AttentionKind.CAUSAL:
        high = torch.minimum(high, position + 1)
    elif window is not None:
        high = torch.minimum(high, position + window)
    if keys.pages is None:  # columns count from the first listed key
        low, high = low - start, high - start
    low, high = low.contiguous(), high.contiguous()
    if keys.pages is None:
        return lambda b, h, q, k: (k >= low[b, q]) & (k < high[b, q])
    pages, page, request = keys.pages, keys.page, tiles.request

    def paged(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        place = pages[request[b], k // page]
        at = place * page + k % page
        return (place >= 0) & (at >= low[b, q]) & (at < high[b, q])

    return paged
