"""Masks of a step: storage on the host's side, offsets and the spelling-out of QLEN_ONLY on the device's.

The device half has static shapes, no host sync, and writes into tensors that exist already, so it may be
recorded in a graph. The buffer of a `VerifyMask` is read where it lies, never copied before that half.
"""

from __future__ import annotations

import itertools

import torch

from anyattn.core.masks import ExplicitMask, TreeMaskMode, VerifyMask
from anyattn.core.metadata.buffers import StepStorage
from anyattn.core.plan import Plan
from anyattn.errors import BatchError

__all__ = ["expand_tree_mask", "fill_mask", "fill_mask_offsets", "locate", "prepare_mask"]


def prepare_mask(plan: Plan, wanted: TreeMaskMode, storage: StepStorage, device: torch.device) -> None:
    """Host half: where cells and offsets of `plan.batch.mask` live. `wanted`: `Traits.tree_mask`.

    Raises:
        BatchError: a `VerifyMask` on another device.
    """
    mask, take = plan.batch.mask, storage.take
    if mask is None:
        return
    plan.mask_mode = TreeMaskMode.FULL_MASK
    if isinstance(mask, ExplicitMask):
        plan.mask_cells = take("mask_cells", (mask.cells.numel(),), torch.bool)
        plan.mask_cells.copy_(mask.cells, non_blocking=True)
        plan.mask_indptr = take("mask_indptr", (mask.indptr.numel(),), torch.int64)
        plan.mask_indptr.copy_(mask.indptr, non_blocking=True)
        plan.host_mask_indptr = mask.indptr.tolist() if mask.indptr.device.type == "cpu" else None
        return
    if mask.buffer.device.type != device.type:
        raise BatchError(
            "a verify mask on another device",
            asked=mask.buffer.device,
            allowed=device,
            hint="VerifyMask.allocate(..., device=pool.device)",
        )
    plan.mask_indptr = take("mask_indptr", (plan.key.num_requests + 1,), torch.int64)
    if mask.mode is TreeMaskMode.QLEN_ONLY and wanted is TreeMaskMode.FULL_MASK:
        plan.mask_cells = take("mask_cells", (_full_size(plan, storage.stable),), torch.bool)
    else:
        plan.mask_cells, plan.mask_mode = mask.buffer, mask.mode
    if plan.host_extend_lens is not None and plan.host_seq_lens is not None:
        full = plan.mask_mode is TreeMaskMode.FULL_MASK
        columns = plan.host_seq_lens if full else plan.host_extend_lens
        sizes = (rows * width for rows, width in zip(plan.host_extend_lens, columns, strict=True))
        plan.host_mask_indptr = [0, *itertools.accumulate(sizes)]


def _full_size(plan: Plan, largest: bool) -> int:
    """Cells of the mask when spelled out: exact where the lengths are, else (and in a graph) a bound."""
    if largest or plan.host_extend_lens is None or plan.host_seq_lens is None:
        return plan.key.num_tokens * plan.max_kv_len
    return sum(d * n for d, n in zip(plan.host_extend_lens, plan.host_seq_lens, strict=True))


def fill_mask(plan: Plan) -> None:  # anyattn: in-graph
    """Device half for a `VerifyMask`: offsets, and the cells where QLEN_ONLY has to be spelled out."""
    mask = plan.batch.mask
    if not isinstance(mask, VerifyMask):
        return
    assert plan.mask_indptr is not None
    assert plan.mask_cells is not None
    full = plan.mask_mode is TreeMaskMode.FULL_MASK
    fill_mask_offsets(plan.extend_lens, plan.seq_lens if full else plan.extend_lens, plan.mask_indptr)
    if mask.mode is not plan.mask_mode:
        expand_tree_mask(mask.buffer, plan.extend_lens, plan.seq_lens, plan.mask_indptr, plan.mask_cells)


def fill_mask_offsets(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """`out int64 [B + 1]`: where each request's `rows * columns` cells start (`rows`, `columns` `[B]`)."""
    out[:1].zero_()  # a number assigned to an element is a copy that the host waits for
    torch.cumsum(rows.long() * columns.long(), 0, out=out[1:])


def locate(
    offsets: torch.Tensor, columns: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(request, row, column, live)`, each `[count]`, of the first `count` cells of packed matrices.

    `offsets int64 [B + 1]`, `columns [B]`. Cells behind the last request are not `live`.
    """
    index = torch.arange(count, device=offsets.device)
    request = torch.searchsorted(offsets[1:], index, right=True)
    live = request < columns.shape[0]
    request = request.clamp_max(columns.shape[0] - 1)
    width = columns.long()[request].clamp_min(1)
    inside = (index - offsets[request]).clamp_min(0)
    return request, inside // width, inside % width, live


def expand_tree_mask(
    cells: torch.Tensor,
    extend_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    full_offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """QLEN_ONLY `cells` as FULL_MASK: `out bool [N]`, `full_offsets int64 [B + 1]` (see `fill_mask_offsets`).

    N may be a bound: cells behind the last request become False.
    """
    own = torch.empty_like(full_offsets)
    fill_mask_offsets(extend_lens, extend_lens, own)
    request, row, column, live = locate(full_offsets, seq_lens, out.shape[0])
    drafts = extend_lens.long()[request]
    node = column - (seq_lens.long()[request] - drafts)
    at = (own[request] + row * drafts + node).clamp_(0, cells.shape[0] - 1)
    torch.logical_and(live, (node < 0) | cells[at].to(torch.bool), out=out)
