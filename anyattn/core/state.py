"""`AttentionState`: a partial attention result that merges exactly, and the sinks that end it.

Formulas: two states over disjoint key sets merge to
`lse = logaddexp(lse_a, lse_b)`, `out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)`
(FlashAttention-2 appendix, arXiv 2307.08691). A sink logit adds `exp(sink)` to the denominator only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.errors import PlanError

__all__ = ["AttentionState"]


@dataclass(frozen=True, eq=False)
class AttentionState:
    """`out [T, Hq, Dv]` and natural-log `lse [T, Hq]` float32, over some of the keys, without sinks.

    A query without keys has lse = -inf and a zero row.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        if self.lse.dtype != torch.float32 or self.lse.shape != self.out.shape[:2]:
            raise PlanError(
                "an AttentionState carries lse [T, Hq] in float32",
                asked=f"{tuple(self.lse.shape)} {self.lse.dtype}",
                allowed=f"{tuple(self.out.shape[:2])} torch.float32",
                hint="convert base and axis order in the adapter",
            )

    def merge(self, other: AttentionState) -> AttentionState:
        """The state over both key sets, for any head count. Accumulates in float32."""
        lse = torch.logaddexp(self.lse, other.lse)
        safe = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
        a = torch.exp(self.lse - safe)[..., None]
        b = torch.exp(other.lse - safe)[..., None]
        out = self.out.float() * a + other.out.float() * b
        return AttentionState(out.to(self.out.dtype), lse)

    def finalise(self, sinks: torch.Tensor | None) -> AttentionState:
        """With `sinks [Hq]` counted: `out * sigmoid(lse - sink)`, `lse = logaddexp(lse, sink)`. Once."""
        if sinks is None:
            return self
        sink = sinks.float()[None, :]
        out = self.out.float() * torch.sigmoid(self.lse - sink)[..., None]
        return AttentionState(out.to(self.out.dtype), torch.logaddexp(self.lse, sink))
