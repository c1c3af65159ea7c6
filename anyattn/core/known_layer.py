"""What a backend knows of a layer after its first call in a mode: all that doesn't change with the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, TypeVar

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.spec import AttentionKind

if TYPE_CHECKING:
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
Store = Callable[["AttentionLayer", torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A layer's slots, k and v."""


def _apart(call: Callable[..., _Result]) -> tuple[Callable[..., _Result], Callable[[], object]]:
    """`function, owner` such that `function(owner(), …)` is `call(…)`; the object of a method isn't held."""
    if isinstance(call, MethodType):
        return call.__func__, weakref.ref(call.__self__)
    return (lambda _, *args: call(*args)), _nobody


def _nobody() -> None:
    """The object of a function."""


def unheld(call: Callable[..., _Result]) -> Callable[..., _Result]:
    """`call`, without holding the object that it is a method of: for what that object keeps itself."""
    function, owner = _apart(call)

    def of_owner(*args: object) -> _Result:
        return function(owner(), *args)

    return of_owner


@dataclass(slots=True, eq=False)
class KnownLayer:
    """A layer that passed the checks of its mode. It doesn't hold the backend that keeps it.

    Attributes:
        group: its plan group in the backend's pool. runner: what computes it, a method of the backend.
        plain: it stores keys and values of its own, one per query token, as q, k and v have them.
        at_once: where the adapter has one, what stores and computes plain calls together.
    """

    layer: AttentionLayer
    mode: ForwardMode
    group: PlanGroup
    runner: InitVar[Callable[[AttentionCall], None]]
    dtype: torch.dtype
    at_once: PlainCall | None = None
    plain: bool = False
    num_q: int = 0
    num_kv: int = 0
    dim: int = 0
    v_dim: int = 0
    _compute: Callable[[object, AttentionCall], None] = field(init=False)
    _owner: Callable[[], object] = field(init=False)

    def __post_init__(self, runner: Callable[[AttentionCall], None]) -> None:
        self._compute, self._owner = _apart(runner)
        spec = self.layer.spec
        owns = spec.kv_shared_with is None and spec.kind in (
            AttentionKind.CAUSAL,
            AttentionKind.BIDIRECTIONAL,
        )
        self.plain = owns and spec.mla is None and self.mode is not ForwardMode.IDLE
        self.num_q, self.num_kv, self.dim, self.v_dim = (
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        )  # fmt: skip

    def run(self, call: AttentionCall) -> None:
        """Write the call's output (and LSE)."""
        self._compute(self._owner(), call)

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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, plan: Plan,
        store: Store,
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
        store(layer, loc, k, v)
        call = AttentionCall(q, k, v, layer, plan, table, out, None, True, group, own_out=own)
        self._compute(self._owner(), call)
        return call.out
