"""What a backend knows of a layer after its first call in a mode: all that doesn't change with the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, TypeVar

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.spec import AttentionKind

if TYPE_CHECKING:
    from anyattn.core.contract import AttentionBackend
    from anyattn.core.groups import PlanGroup
    from anyattn.core.layer import AttentionLayer
    from anyattn.core.plan import Plan

__all__ = ["KnownLayer", "PlainCall", "unheld"]

_Result = TypeVar("_Result")

PlainCall = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor, "Plan"],
    "torch.Tensor | None",
]
"""q, k, v, out and slots of a plain call, one a token, to its output. It checks what `KnownLayer.takes` does;
None says that nothing was done, and the ordinary path is to be taken. A backend keeps it, so it must not hold
that backend (`unheld`): memory of a device would stay until Python looks for cycles.
"""


def unheld(call: Callable[..., _Result]) -> Callable[..., _Result]:
    """`call`, without holding the object that it is a method of: for what that object keeps itself."""
    if not isinstance(call, MethodType):
        return call
    function, owner = call.__func__, weakref.ref(call.__self__)

    def of_owner(*args: object) -> _Result:
        result: _Result = function(owner(), *args)
        return result

    return of_owner


@dataclass(slots=True, eq=False)
class KnownLayer:
    """A layer that passed the checks of its mode. It doesn't hold the backend that keeps it, and is given it.

    Attributes:
        group: its plan group in the backend's pool. method: what computes it, by the name that it has there.
        plain: it stores keys and values of its own, one per query token, as q, k and v have them.
        at_once: where the adapter has one, what stores and computes plain calls together.
    """

    layer: AttentionLayer
    mode: ForwardMode
    group: PlanGroup
    method: str
    dtype: torch.dtype
    at_once: PlainCall | None = None
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

    def call(
        self, backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor | None, plan: Plan,
    ) -> torch.Tensor | None:  # fmt: skip
        """The output of a plain call whose tensors need no reshaping, stored and computed; None: another."""
        group, tokens = self.group, plan.key.num_tokens
        loc = plan.write_loc(group.table)
        if loc is None or loc.shape[0] != tokens:
            return None
        if self.at_once is not None:
            made = self.at_once(q, k, v, out, loc, plan)
            if made is not None:
                return made
        if not self.takes(tokens, q, k, v, out):
            return None
        own = out is None
        if out is None:
            out = q.new_empty((tokens, self.num_q, self.v_dim))
        layer, table = self.layer, plan.tables.get(group.table)
        backend.write_kv(layer, loc, k, v)
        call = AttentionCall(q, k, v, layer, plan, table, out, None, True, group, own_out=own)
        getattr(backend, self.method)(call)
        return call.out
