"""What a backend knows of a layer after its first call in a mode: all that doesn't change with the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.spec import AttentionKind

if TYPE_CHECKING:
    from anyattn.core.call import AttentionCall
    from anyattn.core.groups import PlanGroup
    from anyattn.core.layer import AttentionLayer

__all__ = ["KnownLayer"]


@dataclass(slots=True, eq=False)
class KnownLayer:
    """A layer that passed the checks of its mode.

    Attributes:
        group: its plan group in the backend's pool. run: what computes it.
        plain: it stores keys and values of its own, one per query token, as q, k and v have them.
    """

    layer: AttentionLayer
    mode: ForwardMode
    group: PlanGroup
    run: Callable[[AttentionCall], None]
    dtype: torch.dtype
    plain: bool = False
    num_q: int = 0
    num_kv: int = 0
    dim: int = 0
    v_dim: int = 0

    def __post_init__(self) -> None:
        spec = self.layer.spec
        owns = spec.kv_shared_with is None and spec.kind in (
            AttentionKind.CAUSAL,
            AttentionKind.BIDIRECTIONAL,
        )
        self.plain = owns and spec.mla is None and self.mode is not ForwardMode.IDLE
        self.num_q, self.num_kv, self.dim, self.v_dim = (
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        )  # fmt: skip

    def takes(
        self, tokens: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None
    ) -> bool:
        """Three tensors per head, of the model's dtype and with dense heads: nothing is left to check or to
        reshape. False for anything else that a call may bring, legal or not.
        """
        dtype, num_kv = self.dtype, self.num_kv
        return (
            q.shape == (tokens, self.num_q, self.dim)
            and k.shape == (tokens, num_kv, self.dim)
            and v.shape == (tokens, num_kv, self.v_dim)
            and q.dtype is dtype
            and k.dtype is dtype
            and v.dtype is dtype
            and q.stride(2) == 1
            and k.stride(2) == 1
            and v.stride(2) == 1
            and (out is None or (out.shape == (tokens, self.num_q, self.v_dim) and out.dtype is dtype))
        )
