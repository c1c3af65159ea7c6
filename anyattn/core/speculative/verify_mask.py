"""Filling a `VerifyMask` on the device from the parents of each request's tree: no host sync."""

from __future__ import annotations

import torch

from anyattn.core.masks import TreeMaskMode, VerifyMask, tree_mask_numel
from anyattn.core.metadata.masks import fill_mask_offsets, locate
from anyattn.errors import BatchError

__all__ = ["TreeMaskMode", "VerifyMask", "ancestors", "fill_tree_mask", "tree_mask_numel"]


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Bool `[B, d, d]`: cell (i, j) says that node j is node i or above it. `parents` int `[B, d]`.

    The transitive closure by squaring: log2(d) products.
    """
    nodes = parents.shape[1]
    index = torch.arange(nodes, device=parents.device)
    reach = ((parents[:, :, None] == index) | (index[:, None] == index)).float()
    for _ in range(max(1, nodes - 1).bit_length()):
        reach = torch.bmm(reach, reach).clamp_max_(1.0)
    return reach > 0


def fill_tree_mask(
    mask: VerifyMask,
    parents: torch.Tensor,
    *,
    seq_lens: torch.Tensor | None = None,
    draft_lens: torch.Tensor | None = None,
) -> None:
    """Write the trees of a step into `mask.buffer`, in place.

    Args:
        parents: int `[B, d]` on the mask's device; -1 hangs a node on the prefix.
        seq_lens: `[B]` KV tokens, the drafts included; FULL_MASK needs them.
        draft_lens: `[B]` nodes of each tree where they differ (the first of each row count).

    Raises:
        BatchError: more requests or nodes than the mask was sized for; FULL_MASK without `seq_lens`; on
            the CPU also a parent that isn't an earlier node.
    """
    batch, nodes = parents.shape
    _check(mask, parents, seq_lens)
    lens = draft_lens
    if lens is None:
        lens = torch.full((batch,), nodes, dtype=torch.int64, device=parents.device)
    full = mask.mode is TreeMaskMode.FULL_MASK
    columns = lens if seq_lens is None or not full else seq_lens
    offsets = torch.empty(batch + 1, dtype=torch.int64, device=parents.device)
    fill_mask_offsets(lens, columns, offsets)
    count = tree_mask_numel(mask.mode, batch, nodes, mask.max_context)
    request, row, column, live = locate(offsets, columns, count)
    node = column - (columns.long() - lens.long())[request]
    reach = ancestors(parents)
    seen = reach[request, row.clamp_max(nodes - 1), node.clamp(0, nodes - 1)]
    mask.buffer[:count] = (live & ((node < 0) | seen)).to(mask.buffer.dtype)


def _check(mask: VerifyMask, parents: torch.Tensor, seq_lens: torch.Tensor | None) -> None:
    batch, nodes = parents.shape
    if not mask.fits(batch, nodes):
        raise BatchError(
            "the verify mask doesn't fit these trees (requests, nodes)",
            asked=(batch, nodes),
            allowed=(mask.max_requests, mask.draft_tokens),
            hint="VerifyMask.allocate for the largest step",
        )
    if mask.mode is TreeMaskMode.FULL_MASK and seq_lens is None:
        raise BatchError(
            "FULL_MASK spells out the prefix",
            asked="no seq_lens",
            allowed="seq_lens [B], the drafts included",
            hint="pass seq_lens, or use QLEN_ONLY",
        )
    if parents.device.type == "cpu":
        late = (parents >= torch.arange(nodes)) | (parents < -1)
        if bool(late.any()):
            request, node = (int(x) for x in late.nonzero()[0])
            raise BatchError(
                f"the parent of node {node} of request {request} isn't an earlier node",
                asked=int(parents[request, node]),
                allowed=f"-1 (the prefix) .. {node - 1}",
                hint="number the nodes so that each comes after its parent",
            )
