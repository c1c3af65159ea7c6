"""Window pools in a step: write lists and tables in the slots of each window size's own pool.

The request table lists FULL slots. A window group's table is trimmed first, in those, and translated after,
exactly once: here for the forms that list slots or pages, by the kernel (through `KVPool.slot_map`) for
REQUEST_TABLE, which has no list to translate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.groups import Space, TableGroup
from anyattn.core.ids import IdKind
from anyattn.core.kv.pools.base import EVICTED, KVPool
from anyattn.core.kv.pools.window import pool_name
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.buffers import StepStorage
from anyattn.core.plan import Plan, Table, TableKind
from anyattn.errors import BatchError

__all__ = ["check_ids", "check_windows", "fill_windows", "prepare_windows", "translate_table", "translates"]


def check_ids(batch: ForwardBatch, pool: KVPool) -> None:
    """`out_cache_loc` is of the kind that the pool's tables list. Raises `BatchError`."""
    stores = batch.out_cache_loc is not None and batch.forward_mode is not ForwardMode.IDLE
    if stores and batch.ids is not pool.ids:
        raise BatchError(
            f"out_cache_loc has {batch.ids.value} ids",
            asked=batch.ids.value,
            allowed=f"{pool.ids.value} ids: what the tables of {type(pool).__name__} list",
            hint="VirtualIds(…) on a UnifiedPool, plain slots on any other",
        )


def translates(pool: KVPool, groups: Iterable[TableGroup]) -> bool:
    """Slots of some group's layers differ from the request table's: else `fill_windows` has nothing to do."""
    mapped = bool(pool.full_to_window) or type(pool).table_map is not KVPool.table_map
    return mapped or any(group.space is Space.WINDOW for group in groups)


def prepare_windows(plan: Plan, pool: KVPool, storage: StepStorage) -> None:
    """Storage for the write list of each window pool, int64 `[T]`."""
    take = storage.take
    loc = plan.listed_loc = plan.write_locs.get(Space.FULL)
    if loc is not None:
        if pool.ids is IdKind.VIRTUAL:
            plan.write_locs[Space.FULL] = take("out_cache_loc.full", tuple(loc.shape), torch.int64)
        for window in pool.full_to_window:
            plan.window_locs[window] = take(f"out_cache_loc.window{window}", tuple(loc.shape), torch.int64)


def fill_windows(plan: Plan, pool: KVPool) -> None:  # anyattn: in-graph
    """Device half, after the tables: static shapes, no host sync."""
    if plan.listed_loc is not None:
        full = pool.table_map(TableGroup())
        if full is not None:
            plan.write_locs[Space.FULL].copy_(full[plan.listed_loc])
        for window, out in plan.window_locs.items():
            out.copy_(pool.full_to_window[window][plan.listed_loc])
    for group, table in plan.tables.items():
        slot_map = pool.table_map(group)
        if slot_map is not None:
            translate_table(table, slot_map)


def translate_table(table: Table, slot_map: torch.Tensor) -> None:
    """Slots or pages of a filled table, in place, through `slot_map int32 [S]`; unused cells stay."""
    kind, page = table.form.kind, table.form.kernel_page
    if kind is TableKind.REQUEST_TABLE:
        return
    if kind is TableKind.BLOCK_TABLE:
        entries = table.blocks
        counts = (table.kv_lens + (page - 1)) // page
        live = torch.arange(entries.shape[1], device=entries.device)[None, :] < counts[:, None]
    else:
        indptr, entries = table.csr
        live = torch.arange(entries.shape[0], device=entries.device) < indptr[-1]
    slots = torch.where(live, entries, torch.zeros_like(entries)) * page
    translated = slot_map[slots].to(entries.dtype)
    if page > 1:
        translated = torch.div(translated, page, rounding_mode="floor")
    entries.copy_(torch.where(live, translated, entries))


def check_windows(plan: Plan, table: RequestTable, pool: KVPool) -> None:
    """Reads device values (checks=full): all that window layers read and write has a window slot.

    Raises:
        BatchError: a query can see a key whose slot was evicted or never mapped; a new token without one.
    """
    real = plan.batch.batch_size - plan.batch.num_padding_requests
    if real == 0:
        return
    rows = plan.req_pool_indices[:real]
    for group in plan.tables:
        slot_map = pool.table_map(group)
        if slot_map is None:
            continue
        seq, prefix = plan.seq_lens[:real], plan.prefix_lens[:real]
        first = torch.zeros_like(prefix)
        if group.window is not None:
            first = (prefix - (group.window - 1)).clamp_min(0)
        column = torch.arange(table.max_context, device=seq.device)[None, :]
        listed = slot_map[table.req_to_token[rows].long()]
        bad = (column >= first[:, None]) & (column < seq[:, None]) & (listed < pool.page_size)
        if bool(bad.any()):
            row, position = (int(x) for x in bad.nonzero()[0])
            window = group.window if group.space is Space.WINDOW else None
            raise _no_slot(window, int(rows[row]), position, int(listed[row, position]))


def _no_slot(window: int | None, row: int, position: int, value: int) -> BatchError:
    why = "was evicted from" if value == EVICTED else "was never mapped in"
    return BatchError(
        f"the token at position {position} of row {row} {why} the {pool_name(window)}",
        asked=f"a read of position {position}",
        allowed="positions whose pages are mapped there",
        hint="map a page before its tokens are written, evict it only when every query is past it "
        "(WindowAllocator.cover, .evict)",
    )
