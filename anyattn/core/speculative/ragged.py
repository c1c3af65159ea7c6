"""`RaggedTrees`: one step's trees, each with as many nodes as it likes, as a batch and as a mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, IntLike
from anyattn.core.masks import ExplicitMask, TreeMaskMode, VerifyMask
from anyattn.core.speculative.tree import Tree
from anyattn.errors import BatchError

__all__ = ["RaggedTrees"]


@dataclass(frozen=True)
class RaggedTrees:
    """Trees of the requests of a TARGET_VERIFY step, in batch order, known on the host."""

    trees: tuple[Tree, ...]

    @property
    def draft_lens(self) -> list[int]:
        """Nodes of each request, the root included."""
        return [tree.num_nodes for tree in self.trees]

    @property
    def rows(self) -> list[slice]:
        """Query rows of each request."""
        ends = list(itertools.accumulate(self.draft_lens, initial=0))
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    @property
    def is_chain(self) -> bool:
        """All trees are chains: the step needs no mask."""
        return all(tree.is_chain for tree in self.trees)

    def positions(self, prefix_lens: Sequence[int]) -> list[int]:
        """Token position of every query row."""
        pairs = zip(self.trees, prefix_lens, strict=True)
        return [position for tree, prefix in pairs for position in tree.positions(prefix)]

    def explicit_mask(self, prefix_lens: Sequence[int]) -> ExplicitMask:
        """Every cell, spelled out on the host."""
        pairs = zip(self.trees, prefix_lens, strict=True)
        return ExplicitMask.from_matrices([tree.full_mask(prefix) for tree, prefix in pairs])

    def write(self, mask: VerifyMask, prefix_lens: Sequence[int] = ()) -> None:
        """Fill `mask.buffer` in place with one copy. FULL_MASK needs `prefix_lens`.

        Raises:
            BatchError: a mask that doesn't fit the trees.
        """
        full = mask.mode is TreeMaskMode.FULL_MASK
        prefixes = list(prefix_lens) if full else [0] * len(self.trees)
        longest = max((p + t.num_nodes for p, t in zip(prefixes, self.trees, strict=True)), default=0)
        if not mask.fits(len(self.trees), max(self.draft_lens, default=0), longest):
            raise BatchError(
                "the verify mask doesn't fit these trees (requests, nodes, context)",
                asked=(len(self.trees), max(self.draft_lens, default=0), longest),
                allowed=(mask.max_requests, mask.draft_tokens, mask.max_context or "any"),
                hint="VerifyMask.allocate for the largest step",
            )
        parts = [tree.full_mask(p).flatten() for tree, p in zip(self.trees, prefixes, strict=True)]
        cells = torch.cat(parts)
        mask.buffer[: cells.numel()].copy_(cells, non_blocking=True)

    def batch(
        self,
        req_pool_indices: IntLike,
        prefix_lens: Sequence[int],
        out_cache_loc: IntLike,
        *,
        mask: VerifyMask | None = None,
        **options: Any,
    ) -> ForwardBatch:
        """The TARGET_VERIFY step: chains without a mask; trees through `mask` (filled here) or cell by cell.

        Raises:
            BatchError: as `ForwardBatch.verify` and `write`.
        """
        if self.is_chain:
            return ForwardBatch.verify(
                req_pool_indices, prefix_lens, self.draft_lens, out_cache_loc, **options
            )
        if mask is not None:
            self.write(mask, prefix_lens)
        return ForwardBatch.verify(
            req_pool_indices,
            prefix_lens,
            self.draft_lens,
            out_cache_loc,
            mask=self.explicit_mask(prefix_lens) if mask is None else mask,
            positions=self.positions(prefix_lens),
            **options,
        )
