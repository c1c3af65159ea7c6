"""The records of one attention call: what a layer passes in, what an adapter sees, what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import Feature
from anyattn.core.spec import AttentionKind

if TYPE_CHECKING:
    from anyattn.core.groups import PlanGroup
    from anyattn.core.layer import AttentionLayer
    from anyattn.core.plan import Plan, Table

__all__ = ["AttentionCall", "LayerInputs", "LayerOutput", "step_kind"]


class LayerOutput(NamedTuple):
    """`out` in q's rank; `lse [T, Hq]` float32 if asked for; `idx_out` of sparse layers."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    idx_out: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Inputs beyond q, k, v. Each field is a feature that the backend declares, or the call is refused."""

    q_rope: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None
    topk_indices: torch.Tensor | None = None
    idx_q: torch.Tensor | None = None
    idx_k: torch.Tensor | None = None
    idx_v: torch.Tensor | None = None

    def features(self) -> tuple[tuple[str, Feature], ...]:
        """`(field, feature)` of every field that is set."""
        return tuple((n, f) for n, f in _INPUT_FEATURES if getattr(self, n) is not None)


_INPUT_FEATURES = (
    ("q_rope", Feature.Q_ROPE),
    ("k_rope", Feature.Q_ROPE),
    ("topk_indices", Feature.TOPK_INDICES),
    ("idx_q", Feature.INDEXER),
    ("idx_k", Feature.INDEXER),
    ("idx_v", Feature.INDEXER),
)


def step_kind(kind: AttentionKind, mode: ForwardMode, masked: bool) -> AttentionKind:
    """The kind that a layer has in a step: an unmasked DLLM_EXTEND makes causal layers bidirectional."""
    if mode is ForwardMode.DLLM_EXTEND and kind is AttentionKind.CAUSAL and not masked:
        return AttentionKind.BIDIRECTIONAL
    return kind


@dataclass(slots=True, eq=False)
class AttentionCall:
    """One layer of one step as an adapter sees it, checked and reshaped.

    Attributes:
        q: `[T, Hq, D]`, possibly strided. k, v: `[T, Hkv, D]` and `[T, Hkv, Dv]`, or None: all KV is in
            the pool.
        stored: k and v have been written to the pool (else attend to them directly).
        out: `[T, Hq, Dv]`, to be written. lse: float32 `[T, Hq]` to be written, or None. own_out: the caller
            gave no `out`, so that a kernel's own result, of the same shape and dtype, may take its place.
        table: the layer's table; None for encoder-only layers.
        group: the layer's plan group on this backend's pool (`layer.plan_group` doesn't know the pool).
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    layer: AttentionLayer
    plan: Plan
    table: Table | None
    out: torch.Tensor
    lse: torch.Tensor | None
    stored: bool
    group: PlanGroup
    inputs: LayerInputs | None = None
    own_out: bool = False

    @property
    def kind(self) -> AttentionKind:
        """Which keys a query sees in this step: the layer's kind, but for a block of diffusion."""
        return step_kind(self.layer.spec.kind, self.plan.key.mode, self.plan.mask_cells is not None)
