"""Decode calls by the compiled kernel itself: what a wrapper's `run` gave it once, given again.

`run` works out some thirty arguments anew in every layer of every step, in Python. Of a planned wrapper they
differ from layer to layer in four tensors alone, and from step to step in the schedule and the page table.
What else `run` of READ_VERSIONS does, without scales and LSE, is to check what was checked here already.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from anyattn.core.plan import Plan

__all__ = ["DecodeCalls", "Launch", "Store", "repeats_launches"]

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Of `loc`, k and v."""

_LISTENERS = ("FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP")
_KERNELS = ("run", "paged_run")
"""Of the compiled module: CUDA cores, tensor cores (decode.py)."""
_PLANNED = (
    "_plan_info",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
)
"""What native planning, or another table, changes of a wrapper."""


def repeats_launches() -> bool:
    """Nobody asked FlashInfer to write down its calls (api_logging.py, trace/template.py)."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _LISTENERS)


class _Watched:
    """A compiled module whose launches are written down."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.launches: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if name not in _KERNELS:
            return function

        def launch(*args: Any) -> object:
            self.launches.append((function, args))
            return function(*args)

        return launch


class Launch:
    """The launch of one planned wrapper, as one step's layers of a slot repeat it.

    Right until the library plans the wrapper itself: then there is a new one.
    """

    __slots__ = ("_args", "_at", "_kernel", "_tried", "_wrapper")

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._tried = wrapper, False
        self._kernel: Callable[..., object] | None = None
        self._args: list[Any] = []
        self._at: tuple[int, ...] = ()

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """`wrapper.run(q, cache, out=out)`, written down the first time."""
        wrapper = self._wrapper
        module = getattr(wrapper, "_cached_module", None)
        if self._tried or module is None or isinstance(module, _Watched):
            wrapper.run(q, cache, out=out)
            return
        self._tried, watched = True, _Watched(module)
        wrapper._cached_module = watched
        try:
            wrapper.run(q, cache, out=out)
        finally:
            wrapper._cached_module = module
        if len(watched.launches) == 1:
            self._read(*watched.launches[0], (q, *cache, out))

    @property
    def known(self) -> bool:
        """Written down: `again` may be called."""
        return self._kernel is not None

    def again(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """The same by the kernel alone."""
        assert self._kernel is not None
        args, wrapper = self._args.copy(), self._wrapper
        at_q, at_k, at_v, at_out, at_info, at_indptr, at_indices, at_last = self._at
        args[at_q], (args[at_k], args[at_v]), args[at_out] = q, cache, out
        args[at_info], args[at_indptr] = wrapper._plan_info, wrapper._paged_kv_indptr_buf
        args[at_indices], args[at_last] = wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf
        self._kernel(*args)

    def _read(self, kernel: Callable[..., object], args: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        """Where in a launch those of the call and of the plan are; each must be there once."""
        changing = (*given, *(getattr(self._wrapper, name) for name in _PLANNED))
        places = [[i for i, arg in enumerate(args) if arg is each] for each in changing]
        if any(each is None for each in changing) or any(len(found) != 1 for found in places):
            return
        at = tuple(found[0] for found in places)
        self._args = [None if i in at else arg for i, arg in enumerate(args)]
        self._at, self._kernel = at, kernel


class DecodeCalls:
    """One layer's new keys and values stored, and attended to with all that are cached (`PlainCall`)."""

    def __init__(
        self,
        slot: int,
        cache: tuple[torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        store: Store,
    ) -> None:
        """`heads`: query heads, KV heads, D (which is Dv, too)."""
        self._slot, self._cache, self._heads, self._dtype, self._store = slot, cache, heads, dtype, store

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        loc: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor | None:
        """`out`, or a fresh tensor in its place; None: nothing was done, take the ordinary path."""
        launches: tuple[Launch, ...] = plan.private.launches
        if not launches:
            return None
        launch = launches[self._slot]
        num_q, num_kv, dim = self._heads
        tokens, dtype = plan.key.num_tokens, self._dtype
        shape, kv_shape = (tokens, num_q, dim), (tokens, num_kv, dim)
        if not (
            launch.known
            and q.shape == shape
            and k.shape == kv_shape
            and v.shape == kv_shape
            and q.dtype is dtype
            and k.dtype is dtype
            and v.dtype is dtype
            and k.stride(2) == 1
            and v.stride(2) == 1
            and q.is_contiguous()
            and not q.data_ptr() & 15
        ):
            return None
        if out is None:
            out = torch.empty_like(q)
        elif not (
            out.shape == shape and out.dtype is dtype and out.is_contiguous() and not out.data_ptr() & 15
        ):
            return None
        self._store(loc, k, v)
        launch.again(q, self._cache, out)
        return out
