"""Decode wrappers planned again for other lengths: FlashInfer's native planner, called directly.

A wrapper's `plan` fixes sizes, dtypes, options and the compiled module. What another step of the same size
changes is the schedule, which the native planner makes of page offsets and lengths, and the tables that
kernels read. That call is made here as the library makes it, without the Python around it; its own
`fast_decode_plan` does so, too, but reads lengths back from the device.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anyattn.backends.cuda.flashinfer_plan import PageArrays
from anyattn.backends.cuda.flashinfer_staging import Staging
from anyattn.core.plan import Table

__all__ = ["READ_VERSIONS", "DecodeAgain", "DecodeSizes"]

READ_VERSIONS = ("0.7.2", "0.7.2.post1")
"""Versions of flashinfer-python whose native call was read (`plan`, `fast_decode_plan` in decode.py). Its
arguments differ from version to version; others are planned from scratch in every step."""

Shape = tuple[int, int]
"""The slot whose layers run a wrapper, and requests of the step."""


class DecodeSizes(NamedTuple):
    """What the native planner is given beside lengths. `cores`: tensor cores. `heads`: query heads, KV heads,
    tokens a page. `inner`: `fa2` or `fa3`. `dtypes`: of queries and of KV.
    """

    cores: bool
    inner: str
    heads: tuple[int, int, int]
    dim: int
    window_left: int
    cap: float
    dtypes: tuple[torch.dtype, torch.dtype]


@dataclass(eq=False)
class _Prepared:
    """A wrapper after `plan` for `shape`. `args`: of its native planner; those from `at` on are the page
    offsets and, on tensor cores, the lengths."""

    shape: Shape
    args: list[Any]
    at: int
    takes_lens: bool


class DecodeAgain:
    """Plans decode wrappers for the shape that they were last planned for."""

    def __init__(self, version: str, staging: Staging) -> None:
        """`version`: of flashinfer-python."""
        self._staging, self.offered = staging, version in READ_VERSIONS
        """Whether any wrapper can be planned so."""
        self._prepared: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()

    def remember(self, wrapper: Any, shape: Shape, sizes: DecodeSizes) -> None:
        """`wrapper` was planned by the library itself just now."""
        if self.offered and hasattr(getattr(wrapper, "_cached_module", None), "plan"):
            self._prepared[wrapper] = _prepare(wrapper, shape, sizes)

    def plan(self, wrapper: Any, shape: Shape, pages: PageArrays, table: Table | None) -> bool:
        """Plan for other lengths. False: it has to be planned by the library, for another shape or at all.

        `table`: what the kernels are to read; None for a captured wrapper, which has its own buffers.
        """
        known = self._prepared.get(wrapper)
        if known is None:
            return False
        if known.shape != shape:
            del self._prepared[wrapper]
            return False
        self._staging.staged(wrapper, _plan, wrapper, known, pages)
        if table is not None:
            wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = table.csr
            wrapper._paged_kv_last_page_len_buf = table.last_page_len
        return True


def _prepare(wrapper: Any, shape: Shape, sizes: DecodeSizes) -> _Prepared:
    requests, graph = shape[1], wrapper.is_cuda_graph_enabled
    spaces = [wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, None]
    dims = (sizes.dim, sizes.dim)
    if not sizes.cores:
        kinds = (torch.empty(0, dtype=dtype) for dtype in sizes.dtypes)
        options = (sizes.window_left, sizes.cap, *dims, *kinds)
        return _Prepared(shape, [*spaces, None, requests, *sizes.heads, graph, *options], 3, False)
    queries = torch.arange(requests + 1, dtype=torch.int32)
    causal = False  # of one query each
    rest = [requests, requests, *sizes.heads, graph, *dims, causal, sizes.window_left]
    if sizes.inner == "fa2":
        rest += [-1, False, 0, 0]  # no fixed split, splits allowed, no other grid beside it, no queries each
    return _Prepared(shape, [*spaces, queries, None, None, *rest], 4, True)


def _plan(wrapper: Any, known: _Prepared, pages: PageArrays) -> None:
    args, at = known.args, known.at
    args[2] = wrapper._pin_memory_int_workspace_buffer
    args[at] = pages.indptr
    if known.takes_lens:
        args[at + 1] = pages.lens
    wrapper._plan_info = wrapper._cached_module.plan(*args)
