"""KV tables in plain torch: static shapes, no host sync, so that the same code may be recorded in a graph.

Every function writes into tensors that it is given.
"""

from __future__ import annotations

import torch

from anyattn.core.plan import Table, TableKind

__all__ = ["fill_block_table", "fill_csr", "fill_kv_extent", "fill_offsets", "fill_positions", "fill_table"]


def fill_offsets(lens: torch.Tensor, out: torch.Tensor) -> None:  # anyattn: in-graph
    """Exclusive prefix sum: `out int32 [B + 1]` from `lens int32 [B]`."""
    out[:1].zero_()  # a number assigned to an element is a copy that the host waits for
    torch.cumsum(lens, 0, dtype=torch.int32, out=out[1:])


def fill_positions(
    offsets: torch.Tensor, prefix_lens: torch.Tensor, out: torch.Tensor
) -> None:  # anyattn: in-graph
    """`out int64 [T]`: prefix + index in the request; 0 behind the last request (padding)."""
    index = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(offsets[1:], index, right=True)
    inside = row < prefix_lens.shape[0]
    row = row.clamp_max(prefix_lens.shape[0] - 1)
    position = prefix_lens[row] + index - offsets[row]
    torch.where(inside, position, torch.zeros_like(position), out=out)


def fill_kv_extent(
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    window: int | None,
    page: int,
    kv_start: torch.Tensor,
    kv_lens: torch.Tensor,
) -> None:
    """First listed position and number of listed tokens, int32 `[B]`.

    The first query stands at `prefix` and sees keys from `prefix - W + 1`; pages begin at multiples of
    `page`, so a page table starts at the page that holds that key.
    """
    if window is None:
        kv_start.zero_()
    else:
        start = (prefix_lens - (window - 1)).clamp_min_(0)
        kv_start.copy_(start - start % page)
    torch.sub(seq_lens, kv_start, out=kv_lens)


def fill_csr(
    source: torch.Tensor, rows: torch.Tensor, kv_start: torch.Tensor, counts: torch.Tensor, page: int,
    indptr: torch.Tensor, indices: torch.Tensor, fill: int,
) -> None:  # fmt: skip
    """`indptr int32 [B + 1]` and `indices [N]` of slots (page 1) or pages; `fill` behind the last one."""
    fill_offsets(counts, indptr)
    index = torch.arange(indices.shape[0], device=indices.device)
    row = torch.searchsorted(indptr[1:], index, right=True)
    live = row < rows.shape[0]
    row = row.clamp_max(rows.shape[0] - 1)
    column = (kv_start[row] + (index - indptr[row]) * page).clamp_(0, source.shape[1] - 1)
    entry = source[rows[row], column]
    if page > 1:
        entry = entry // page
    indices.copy_(torch.where(live, entry, torch.full_like(entry, fill)))


def fill_block_table(
    source: torch.Tensor, rows: torch.Tensor, kv_start: torch.Tensor, counts: torch.Tensor, page: int,
    out: torch.Tensor, fill: int,
) -> None:  # fmt: skip
    """`out [B, width]` of page numbers; `fill` behind each request's last page."""
    column = torch.arange(out.shape[1], device=out.device)[None, :]
    token = (kv_start[:, None] + column * page).clamp_(0, source.shape[1] - 1)
    entry = source[rows[:, None], token]
    if page > 1:
        entry = entry // page
    out.copy_(torch.where(column < counts[:, None], entry, torch.full_like(entry, fill)))


def fill_table(  # anyattn: in-graph
    table: Table, source: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor, window: int | None,
) -> None:  # fmt: skip
    """Fill one table of any form from `source int32 [R + 1, columns]` (`req_to_token`)."""
    form = table.form
    page = form.kernel_page
    fill_kv_extent(seq_lens, prefix_lens, window, page, table.kv_start, table.kv_lens)
    if form.kind is TableKind.REQUEST_TABLE:
        return
    counts = table.kv_lens if page == 1 else (table.kv_lens + (page - 1)) // page
    if form.kind is TableKind.BLOCK_TABLE:
        fill_block_table(source, rows, table.kv_start, counts, page, table.blocks, form.fill)
        return
    indptr, indices = table.csr
    fill_csr(source, rows, table.kv_start, counts, page, indptr, indices, form.fill)
    if table.last_page_len is not None:
        last = table.kv_lens - (counts - 1).clamp_min(0) * page
        table.last_page_len.copy_(last)
