"""What the host can say about a table before it is built: lengths, offsets and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode, UpperBound
from anyattn.core.groups import Space, TableGroup
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.plan import HostTable, TableForm
from anyattn.errors import BatchError

__all__ = ["Extent", "max_kv_len", "max_q_len", "table_extent"]


@dataclass(frozen=True, eq=False)
class Extent:
    """Sizes of one table: `entries` over all requests, `widest` row, host mirrors where exact."""

    entries: int
    widest: int
    host: HostTable | None


def max_q_len(batch: ForwardBatch) -> int:
    """Largest number of query tokens of a request: exact, or a bound."""
    if batch.exact is not None:
        return int(batch.exact.extend_lens.max()) if batch.batch_size else 0
    if batch.forward_mode is ForwardMode.DECODE:
        return 1
    if isinstance(batch.host_lens, UpperBound):
        return batch.host_lens.max_extend_len
    return batch.num_tokens


def max_kv_len(batch: ForwardBatch, max_context: int) -> int:
    """Largest number of KV tokens of a request: exact, or a bound."""
    if batch.exact is not None:
        return int(batch.exact.seq_lens.max()) if batch.batch_size else 0
    if isinstance(batch.host_lens, UpperBound):
        return min(batch.host_lens.max_seq_len, max_context)
    return max_context


def table_extent(
    batch: ForwardBatch, group: TableGroup, form: TableForm, table: RequestTable, *, prefix_only: bool = False
) -> Extent:
    """Sizes of the group's table; `prefix_only`: it lists cached tokens alone.

    Raises:
        BatchError: an encoder group without encoder lengths or without an encoder table.
    """
    page = form.kernel_page
    if group.space is Space.ENCODER:
        lens = batch.encoder_lens
        if lens is None or table.encoder_to_token is None:
            raise BatchError(
                "cross-attention layers need encoder lengths and an encoder table",
                asked="no encoder_lens" if lens is None else "RequestTable without encoder columns",
                allowed="both",
                hint="pass encoder_lens to the batch and max_encoder to RequestTable",
            )
        kv_lens = lens if lens.device.type == "cpu" else None
        widest = table.max_encoder
    else:
        exact = batch.exact
        kv_lens = None if exact is None else _visible(exact.seq_lens, exact.extend_lens, group.window, page)
        if prefix_only and exact is not None and kv_lens is not None:
            kv_lens = kv_lens - exact.extend_lens
        widest = max_kv_len(batch, table.max_context)
    if kv_lens is None:
        pages = -(-widest // page)
        return Extent(batch.batch_size * pages, pages, None)
    counts = (kv_lens + (page - 1)) // page
    indptr = torch.zeros(counts.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    widest = int(counts.max()) if counts.numel() else 0
    return Extent(int(indptr[-1]), widest, HostTable(indptr, kv_lens.to(torch.int32)))


def _visible(seq: torch.Tensor, ext: torch.Tensor, window: int | None, page: int) -> torch.Tensor:
    """Listed tokens per request; the host twin of `tables.fill_kv_extent`."""
    if window is None:
        return seq
    start = (seq - ext - (window - 1)).clamp_min(0)
    return seq - (start - start % page)
