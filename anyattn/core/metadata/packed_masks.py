"""Explicit masks as bits, for kernels that read them so: cut to a table, the window in token positions.

Layout: request i's `rows x columns` cells (its query tokens, and the keys that its table lists) are numbered
row by row and lie eight to a byte, lowest bit first, from byte `offsets[i]` on, where `offsets` counts
*cells*: FlashInfer's `plan(packed_custom_mask=)` adds cell offsets to a byte pointer
(`_compute_page_mask_indptr` in prefill.py, `DefaultAttention` in variants.cuh of 0.7.2). Seven of eight bytes
stay unused.
"""

from __future__ import annotations

import torch

from anyattn.core.masks import TreeMaskMode
from anyattn.core.metadata.masks import fill_mask_offsets, locate
from anyattn.core.plan import Plan, Table

__all__ = ["pack_mask"]


def pack_mask(plan: Plan, table: Table, window: int | None, out: torch.Tensor) -> None:
    """Bits of `plan`'s mask for the keys that `table` lists, to `out uint8 [cells]`.

    A key is visible where the mask says so and, with `window` W, where it stands after `position - W`: tree
    siblings share a position, so a kernel that counts columns can't apply the window itself. Static shapes,
    no host sync. The plan's mask is FULL_MASK, its tables list whole sequences (PAGED).
    """
    assert plan.mask_cells is not None
    assert plan.mask_indptr is not None
    assert plan.mask_mode is TreeMaskMode.FULL_MASK
    offsets = torch.empty_like(plan.mask_indptr)
    fill_mask_offsets(plan.extend_lens, table.kv_lens, offsets)
    request, row, column, live = locate(offsets, table.kv_lens, out.shape[0])
    key = column + table.kv_start[request]
    cell = plan.mask_indptr[request] + row * plan.seq_lens[request] + key
    seen = plan.mask_cells[cell.clamp_(0, plan.mask_cells.shape[0] - 1)].to(torch.bool) & live
    if window is not None:
        seen &= _in_window(plan, request, row, key, window)
    index = torch.arange(out.shape[0], device=out.device) - offsets[request]
    byte = (offsets[request] + index // 8).clamp_(0, out.shape[0] - 1)
    out.zero_().scatter_add_(0, byte, seen.to(torch.uint8) << (index % 8).to(torch.uint8))


def _in_window(
    plan: Plan, request: torch.Tensor, row: torch.Tensor, key: torch.Tensor, window: int
) -> torch.Tensor:
    """Cached keys stand at their index, new ones where their query stands."""
    first, last = plan.query_offsets[request], plan.positions.shape[0] - 1
    own = key - plan.prefix_lens[request]
    node = plan.positions[(first + own).clamp_(0, last)]
    position = torch.where(own < 0, key, node)
    return position > plan.positions[(first + row).clamp_(0, last)] - window
