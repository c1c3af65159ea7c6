"""Steps of a few query tokens a request in the Triton backend: which have their keys cut, and their plans."""

from __future__ import annotations

import torch

from anyattn.core.groups import PlanGroup, Space
from anyattn.core.masks import TreeMaskMode, VerifyMask
from anyattn.core.plan import Plan
from anyattn.core.spec import AttentionKind
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.configs.choose_verify import choose_verify
from anyattn.kernels.triton.verify_launch import ALL_COLUMNS, DRAFTS, NO_MASK, VerifyMasks, VerifyStep

__all__ = ["verify_step"]


def verify_step(
    plan: Plan, group: PlanGroup, heads: Heads, source: torch.Tensor, run: int, *,
    itemsize: int, kv_itemsize: int, arch: str, units: int, even: bool,
) -> VerifyStep | None:  # fmt: skip
    """With storage of its own; None where the extend kernels are the faster ones.

    Args:
        source: request table. run: consecutive slots of a table entry. even: see `choose_verify`; the others
            as there. Everything else follows from the plan's shapes and bounds.
    """
    table = plan.tables.get(group.table)
    if table is None or group.table.space is Space.ENCODER or group.table.kind is AttentionKind.ENCODER_ONLY:
        return None
    longest, window = plan.max_kv_len, group.table.window
    if window is not None:
        longest = min(longest, window + plan.max_q_len + run)  # a trimmed table begins at a page
    masks = _masks(plan)
    tiles = choose_verify(
        max(1, plan.key.num_requests), heads.num_kv, heads.group, max(1, plan.max_q_len),
        power_of_two(longest), max(heads.dim, heads.v_dim), itemsize, arch, units, even=even,
        masked=masks.kind == ALL_COLUMNS, kv_itemsize=kv_itemsize,
    )  # fmt: skip
    if tiles is None:
        return None
    return VerifyStep.of(
        source, plan.req_pool_indices, table.kv_start, table.kv_lens, plan.query_offsets, plan.prefix_lens,
        run, heads, tiles, masks,
    )  # fmt: skip


def _masks(plan: Plan) -> VerifyMasks:
    """A mask of the drafts among themselves shows what is older, spelled out as it may be."""
    mask, kind = plan.batch.mask, NO_MASK
    if plan.mask_cells is not None:
        drafts = isinstance(mask, VerifyMask) and mask.mode is TreeMaskMode.QLEN_ONLY
        kind = DRAFTS if drafts else ALL_COLUMNS
    positions = None if plan.batch.positions is None else plan.positions
    return VerifyMasks(kind, plan.mask_cells, plan.mask_indptr, positions)
