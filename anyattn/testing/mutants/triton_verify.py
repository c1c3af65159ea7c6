"""Faults in the Triton kernel for a few query tokens on cut keys, and in its merge."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_KERNELS = "anyattn.kernels.triton.verify"
_BESIDE = ("few tokens beside",)
_FEW = ("few tokens",)

MUTANTS = (
    Mutant(
        name="a draft sees the next one",
        where=f"{_KERNELS}:_seen",
        old="column[None, :] <= prefix + token[:, None]",
        new="column[None, :] <= prefix + token[:, None] + 1",
        names=_FEW,
    ),
    Mutant(
        name="rows of a tree as long as the prefix",
        where=f"{_KERNELS}:_seen",
        old="at = token[:, None] * seq_len",
        new="at = token[:, None] * prefix",
        names=(*_FEW, "verify-mask"),
    ),
    Mutant(
        name="the first draft taken for an older token",
        where=f"{_KERNELS}:_seen",
        old="cell = cell | (column < prefix)[None, :]",
        new="cell = cell | (column <= prefix)[None, :]",
        names=("verify-mask",),
    ),
    Mutant(
        name="pieces of all ranges in one place",
        where=f"{_KERNELS}:_piece",
        old="piece = ((r + b).to(tl.int64)",
        new="piece = ((r * 0 + b).to(tl.int64)",
        names=_FEW,
    ),
    Mutant(
        name="a piece of another request merged",
        where=f"{_KERNELS}:merge_verify_kernel",
        old="_merged(part_out, part_lse, r + b, pieces",
        new="_merged(part_out, part_lse, r, pieces",
        names=_FEW,
    ),
    Mutant(
        name="new tokens counted by every piece",
        where=f"{_KERNELS}:_piece",
        old="if stop == tiles:  # whoever",
        new="if stop > at:  # whoever",
        names=_FEW,
    ),
    Mutant(
        name="sink dropped where pieces of a few tokens merge",
        where=f"{_KERNELS}:merge_verify_kernel",
        old="if HAS_SINKS:",
        new="if HAS_SINKS and rows < 1:",
        names=_FEW,
    ),
    Mutant(
        name="a request that neither kernel takes for its own",
        where="anyattn.kernels.triton.extend:extend_kernel",
        old="(extend <= few)",
        new="(extend <= few + tl.minimum(few, 1))",
        names=_BESIDE,
    ),
    Mutant(
        name="keys of a few tokens taken for another kernel's",
        where="anyattn.kernels.triton.ranges:few_keys_kernel",
        old="tl.where(end - begin > max_new, 0, keys)",
        new="tl.where(end - begin > 1, 0, keys)",
        names=_BESIDE,
    ),
)
