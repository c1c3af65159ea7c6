"""Explicit visibility of keys: `ExplicitMask` (cells of a step), `VerifyMask` (a buffer filled by a drafter).

A tree mask has two forms. FULL_MASK spells out every column: `d x seq_len` cells a request. QLEN_ONLY
spells out the draft tokens among themselves, `d x d` cells; the prefix is visible to all of them. Both lay
requests one after another, rows first, tightly packed; both name *columns* (key indices), so siblings of a
tree, which share a position, have cells of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyattn.core.traits import TreeMaskMode
from anyattn.errors import ConfigError

__all__ = ["ExplicitMask", "TreeMaskMode", "VerifyMask", "tree_mask_numel"]


@dataclass(frozen=True)
class ExplicitMask:
    """Bool cells (True = visible) of every (query, key) pair, requests one after another, rows first.

    `cells [sum(extend_len_i * seq_len_i)]`; request i starts at `indptr[i]` (int64 `[B + 1]`); the row
    stride is `seq_lens[i]`, the *untrimmed* length, so columns are key indices 0 .. seq_len - 1.
    """

    cells: torch.Tensor
    indptr: torch.Tensor

    @staticmethod
    def from_matrices(masks: Sequence[torch.Tensor]) -> ExplicitMask:
        """From one bool `[extend_len, seq_len]` matrix per request."""
        sizes = torch.tensor([0, *(m.numel() for m in masks)], dtype=torch.int64, device="cpu")
        cells = torch.cat([m.reshape(-1).to(torch.bool) for m in masks])
        return ExplicitMask(cells, sizes.cumsum(0))


def tree_mask_numel(mode: TreeMaskMode, requests: int, draft_tokens: int, max_context: int) -> int:
    """Cells of the largest mask of `requests` requests of `draft_tokens` each.

    `max_context` bounds `seq_len`, the draft tokens included (FULL_MASK only).
    """
    columns = draft_tokens if mode is TreeMaskMode.QLEN_ONLY else max_context
    return requests * draft_tokens * columns


@dataclass(frozen=True, eq=False)
class VerifyMask:
    """A tree mask on the device that a drafter writes in place, before or after the step is planned.

    The buffer is read by the device half of planning (`init_forward_metadata_in_graph`) and by kernels, so
    it must be filled by then; nothing of it crosses to the host. Offsets follow from the step's lengths.

    Attributes:
        buffer: bool or uint8 `[>= tree_mask_numel(...)]`, packed from its start as the mode says.
        max_requests, draft_tokens, max_context: what it was sized for; `draft_tokens` counts the query
            tokens of one request, the root included.

    Raises:
        ConfigError: another dtype or rank, or a buffer that is too small.
    """

    buffer: torch.Tensor
    mode: TreeMaskMode
    max_requests: int
    draft_tokens: int
    max_context: int = 0

    def __post_init__(self) -> None:
        needed = tree_mask_numel(self.mode, self.max_requests, self.draft_tokens, self.max_context)
        given = self.buffer
        if given.dtype not in (torch.bool, torch.uint8) or given.dim() != 1 or not given.is_contiguous():
            raise ConfigError(
                "buffer of a verify mask",
                asked=f"{given.dtype} of rank {given.dim()}",
                allowed="contiguous, 1-D, torch.bool or torch.uint8",
                hint="VerifyMask.allocate",
            )
        if min(self.max_requests, self.draft_tokens) < 1 or needed < 1 or given.numel() < needed:
            raise ConfigError(
                "a verify mask that is too small for what it names",
                asked=f"{given.numel()} cells",
                allowed=f">= {needed} for {self.max_requests} requests of {self.draft_tokens} draft tokens"
                f" ({self.mode.value}, context {self.max_context}), each at least 1",
                hint="tree_mask_numel(mode, requests, draft_tokens, max_context)",
            )

    @staticmethod
    def allocate(
        mode: TreeMaskMode,
        *,
        max_requests: int,
        draft_tokens: int,
        max_context: int = 0,
        device: torch.device | str = "cpu",
    ) -> VerifyMask:
        """A mask with all cells False. Raises `ConfigError` for sizes below 1."""
        numel = max(0, tree_mask_numel(mode, max_requests, draft_tokens, max_context))
        buffer = torch.zeros(numel, dtype=torch.bool, device=device)
        return VerifyMask(buffer, mode, max_requests, draft_tokens, max_context)

    def fits(self, num_requests: int, draft_tokens: int = 1, seq_len: int = 0) -> bool:
        """True if steps of this many requests, draft tokens and KV tokens per request have room."""
        wide_enough = self.mode is TreeMaskMode.QLEN_ONLY or seq_len <= self.max_context
        return num_requests <= self.max_requests and draft_tokens <= self.draft_tokens and wide_enough
