"""What the host can say about a table before it is built: lengths, offsets and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.groups import Space, TableGroup
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.plan import HostTable, TableForm, TableKind
from anyattn.errors import BatchError

__all__ = ["Extent", "csr_entries", "max_kv_len", "max_q_len", "mirrored", "table_extent", "table_mirrors"]

_LEAST_ROOM = 64  # entries


@dataclass(frozen=True, eq=False)
class Extent:
    """Sizes of one table: `entries` over all requests, `widest` row; `mirrors` makes host mirrors."""

    entries: int
    widest: int
    mirrors: Callable[[], HostTable] | None


def max_q_len(batch: ForwardBatch) -> int:
    """Largest number of query tokens of a request: exact, or a bound."""
    if batch.forward_mode is ForwardMode.DECODE:
        return 1
    if batch.exact is not None:
        return int(batch.exact.extend_lens.max()) if batch.batch_size else 0
    if isinstance(batch.host_lens, UpperBound):
        return batch.host_lens.max_extend_len
    return batch.num_tokens


def max_kv_len(batch: ForwardBatch, max_context: int) -> int:
    """Largest number of KV tokens of a request: exact, or a bound."""
    lens = batch.host_lens
    if isinstance(lens, Exact):
        return lens.longest
    return min(lens.max_seq_len, max_context) if isinstance(lens, UpperBound) else max_context


def table_extent(
    batch: ForwardBatch,
    group: TableGroup,
    form: TableForm,
    table: RequestTable,
    *,
    prefix_only: bool = False,
    largest: bool = False,
) -> Extent:
    """Sizes of the group's table.

    Args:
        prefix_only: it lists cached tokens alone.
        largest: as large as any step of this many requests can need, whatever this one's lengths are: what
            a graph has frozen.

    Raises:
        BatchError: an encoder group without encoder lengths or without an encoder table.
    """
    mirrors = table_mirrors(batch, group, form, table, prefix_only=prefix_only)
    if form.kind is TableKind.REQUEST_TABLE:
        return Extent(0, 0, mirrors)
    page, encoder = form.kernel_page, group.space is Space.ENCODER
    plain = form.kind is TableKind.BLOCK_TABLE and group.window is None and not prefix_only and not encoder
    if largest or plain or mirrors is None:
        longest = table.max_encoder if encoder else table.max_context
        if not largest and not encoder:
            longest = max_kv_len(batch, longest)
        pages = -(-longest // page)
        return Extent(batch.batch_size * pages, pages, mirrors)
    whole = group.window is None and not prefix_only and not encoder
    if whole and batch.forward_mode is ForwardMode.DECODE:
        return Extent(csr_entries(batch, page, table.max_context), 0, mirrors)
    counts = (_listed(batch, group, page, prefix_only) + (page - 1)) // page
    return Extent(int(counts.sum()), int(counts.max()) if counts.numel() else 0, mirrors)


def csr_entries(batch: ForwardBatch, page: int, max_context: int) -> int:
    """Room of a decode step's list of all pages: rounded up, so that it lasts for some steps."""
    exact = batch.exact
    if exact is None:
        return batch.batch_size * -(-max_kv_len(batch, max_context) // page)
    most = (exact.total + batch.batch_size * (page - 1)) // page
    step = max(_LEAST_ROOM, 1 << max(0, most.bit_length() - 4))
    return -(-most // step) * step


def table_mirrors(
    batch: ForwardBatch, group: TableGroup, form: TableForm, table: RequestTable, *, prefix_only: bool = False
) -> Callable[[], HostTable] | None:
    """Makes the host mirrors of the group's table; None where the host doesn't know its lengths.

    Raises:
        BatchError: an encoder group without encoder lengths or without an encoder table.
    """
    if group.space is not Space.ENCODER:
        known = isinstance(batch.host_lens, Exact)
    else:
        lens = batch.encoder_lens
        if lens is None or table.encoder_to_token is None:
            raise BatchError(
                "cross-attention layers need encoder lengths and an encoder table",
                asked="no encoder_lens" if lens is None else "RequestTable without encoder columns",
                allowed="both",
                hint="pass encoder_lens to the batch and max_encoder to RequestTable",
            )
        known = lens.is_cpu
    return partial(mirrored, batch, group, form.kernel_page, prefix_only) if known else None


def _listed(batch: ForwardBatch, group: TableGroup, page: int, prefix_only: bool) -> torch.Tensor:
    """Tokens that the table lists for each request, int64 `[B]`; the host knows them."""
    if group.space is Space.ENCODER:
        assert batch.encoder_lens is not None
        return batch.encoder_lens
    exact = batch.exact
    assert exact is not None
    listed = _visible(exact.seq_lens, exact.extend_lens, group.window, page)
    return listed - exact.extend_lens if prefix_only else listed


def mirrored(batch: ForwardBatch, group: TableGroup, page: int, prefix_only: bool = False) -> HostTable:
    """Offsets and lengths of the group's table, entries of which stand for `page` tokens; they are known."""
    kv_lens = _listed(batch, group, page, prefix_only)
    counts = (kv_lens + (page - 1)) // page
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    return HostTable(indptr, kv_lens.to(torch.int32))


def _visible(seq: torch.Tensor, ext: torch.Tensor, window: int | None, page: int) -> torch.Tensor:
    """Listed tokens per request; the host twin of `tables.fill_kv_extent`."""
    if window is None:
        return seq
    start = (seq - ext - (window - 1)).clamp_min(0)
    return seq - (start - start % page)
