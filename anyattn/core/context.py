"""`ForwardContext`: the backend and plan that attention layers run with, held in a context variable."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Protocol

from anyattn.errors import ContextError

if TYPE_CHECKING:
    import torch

    from anyattn.core.batch import ForwardBatch
    from anyattn.core.call import LayerInputs, LayerOutput
    from anyattn.core.layer import AttentionLayer
    from anyattn.core.plan import Plan

__all__ = ["Attends", "ForwardContext", "active_context", "current_context", "forward_context"]


class Attends(Protocol):
    """What a layer calls: a backend, or a wrapper of backends."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        inputs: LayerInputs | None = None,
        plan: Plan,
    ) -> LayerOutput:
        """See `AttentionBackend.forward`."""
        ...


class ForwardContext(NamedTuple):
    """What a layer call is redirected to: drafts, streams and sub-batches nest their own."""

    backend: Attends
    plan: Plan


_current: ContextVar[ForwardContext | None] = ContextVar("anyattn_forward_context", default=None)
active_context = _current.get
"""The active context, or None."""


def current_context() -> ForwardContext:
    """The active context. Raises `ContextError` outside `forward_context`."""
    context = _current.get()
    if context is None:
        raise ContextError(
            "an attention layer was called outside forward_context",
            asked="a layer call without a context",
            allowed="calls inside `with anyattn.forward_context(backend, plan)`",
            hint="plan = backend.init_forward_metadata(batch); "
            "with anyattn.forward_context(backend, plan): …",
        )
    return context


class _Entered:
    """What `with` enters: a generator would cost three times as much, in every step."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context

    def __enter__(self) -> ForwardContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def forward_context(backend: Attends, plan: Plan) -> AbstractContextManager[ForwardContext]:
    """Run attention layers with this backend and plan. Nests; per thread and per task. Entered once.

    Raises:
        ContextError: something else than a backend and a plan.
    """
    if not (hasattr(backend, "forward") and hasattr(plan, "key")):
        raise ContextError(
            "forward_context takes a backend and a plan",
            asked=f"{type(backend).__name__}, {type(plan).__name__}",
            allowed="what create_backend and init_forward_metadata return",
            hint="with anyattn.forward_context(backend, backend.init_forward_metadata(batch)): …",
        )
    return _Entered(ForwardContext(backend, plan))
