"""Decode wrappers planned again for other lengths: FlashInfer's native planner, called directly.

A wrapper's `plan` fixes sizes, dtypes, options and the compiled module. What another step of the same size
changes is the schedule, which the native planner makes of page offsets and lengths, and the tables that
kernels read. That call is made here as the library makes it, without the Python around it; its own
`fast_decode_plan` does so, too, but reads lengths back from the device.

A schedule that is on the device already is left there: that of the fa2 template and of CUDA cores follows
from page offsets alone (`PrefillPlan` and `DecodePlan` in scheduler.cuh take no other lengths), so it stands
for as many steps as no request begins a page.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anyattn.backends.cuda.flashinfer_plan import KeptPages
from anyattn.backends.cuda.flashinfer_staging import PIECE, Staging
from anyattn.core.plan import Table

__all__ = ["READ_VERSIONS", "DecodeAgain", "DecodeSizes", "Prepared", "point_to"]

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


@dataclass(eq=False, slots=True)
class _Space:
    """An integer workspace on the device: whose schedule it holds (`Prepared.mark`), made of what, copied on
    which stream.
    """

    owner: object = None
    stamp: bytes = b""
    stream: int | None = None


@dataclass(eq=False, slots=True)
class Prepared:
    """A wrapper after `plan` for `shape`.

    Attributes:
        args: of its native planner; those from `at` on: page offsets and, on tensor cores, lengths.
        by_length: its schedule follows from lengths, not from page offsets alone.
        mark: what its `space` knows it by. Held itself, both would stay, with all workspaces, as a cycle.
        ints: its integer workspace, and as much of it as `PIECE`; whole: it takes more than that.
    """

    shape: Shape
    args: list[Any]
    at: int
    takes_lens: bool
    by_length: bool
    module: Any
    space: _Space
    ints: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    whole: bool = False
    mark: object = field(default_factory=object)

    def __post_init__(self) -> None:
        ints: torch.Tensor = self.args[1]
        self.ints = ints, ints[:PIECE]

    def plan(self, pages: KeptPages, ints: torch.Tensor, pinned: torch.Tensor) -> Any:
        """The native planner's own result, for work lists in `ints`, made in `pinned` of that size."""
        args, at = self.args, self.at
        args[1], args[2], args[at] = ints, pinned, pages.indptr
        if self.takes_lens:
            args[at + 1] = pages.lens
        return self.module.plan(*args)


class DecodeAgain:
    """Plans decode wrappers for the shape that they were last planned for."""

    def __init__(self, version: str, staging: Staging) -> None:
        """`version`: of flashinfer-python."""
        self._staging, self.offered = staging, version in READ_VERSIONS
        """Whether any wrapper can be planned so."""
        self._prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()
        self._spaces: dict[int, _Space] = {}

    def remember(self, wrapper: Any, shape: Shape, sizes: DecodeSizes) -> None:
        """`wrapper` was planned by the library itself just now."""
        if self.offered and hasattr(getattr(wrapper, "_cached_module", None), "plan"):
            self._prepared[wrapper] = _prepare(wrapper, shape, sizes, self._space(wrapper))

    def forget(self, wrapper: Any) -> None:
        """`wrapper` is about to be planned by the library: whatever its workspace holds is overwritten."""
        if self._prepared.pop(wrapper, None) is not None or self._spaces:
            self._space(wrapper).owner = None

    def prepared(self, wrapper: Any, shape: Shape) -> Prepared | None:
        """What plans `wrapper` again; None: the library has to, for another shape or at all."""
        known = self._prepared.get(wrapper)
        return None if known is None or known.shape != shape else known

    def plan(self, wrapper: Any, known: Prepared, pages: KeptPages) -> None:
        """Plan for other lengths, those of the tables that kernels read."""
        stream, stamp, space = self._staging.stream(), pages.stamp(known.by_length), known.space
        if space.owner is known.mark and space.stamp == stamp and space.stream == stream is not None:
            return
        space.owner = None
        if known.whole or not self._in_piece(wrapper, known, pages):
            self._staging.staged(wrapper, _in_whole, wrapper, known, pages)
        space.owner, space.stamp, space.stream = known.mark, stamp, stream

    def _in_piece(self, wrapper: Any, known: Prepared, pages: KeptPages) -> bool:
        """Planned in a piece of memory; False where there is none, or it was refused."""
        source = self._staging.pieces
        if source is None:
            return False
        with source.lock:
            pinned = source.take()
            if pinned is None:
                return False
            try:
                wrapper._plan_info = known.plan(pages, known.ints[1], pinned)
            except Exception:  # of whatever kind the binding gives: the whole memory shows whether it's that
                known.whole = True
                return False
        return True

    def _space(self, wrapper: Any) -> _Space:
        return self._spaces.setdefault(wrapper._int_workspace_buffer.data_ptr(), _Space())


def point_to(wrapper: Any, table: Table) -> None:
    """Kernels of a wrapper without buffers of its own read this table from now on."""
    wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = table.csr
    wrapper._paged_kv_last_page_len_buf = table.last_page_len


def _prepare(wrapper: Any, shape: Shape, sizes: DecodeSizes, space: _Space) -> Prepared:
    requests, graph, module = shape[1], wrapper.is_cuda_graph_enabled, wrapper._cached_module
    spaces = [wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, None]
    dims = (sizes.dim, sizes.dim)
    if not sizes.cores:
        kinds = (torch.empty(0, dtype=dtype, device="cpu") for dtype in sizes.dtypes)
        options = (sizes.window_left, sizes.cap, *dims, *kinds)
        args = [*spaces, None, requests, *sizes.heads, graph, *options]
        return Prepared(shape, args, 3, False, False, module, space)
    queries = torch.arange(requests + 1, dtype=torch.int32, device="cpu")
    causal = False  # of one query each
    rest = [requests, requests, *sizes.heads, graph, *dims, causal, sizes.window_left]
    if sizes.inner == "fa2":
        rest += [-1, False, 0, 0]  # no fixed split, splits allowed, no other grid beside it, no queries each
    by_length = sizes.inner != "fa2"
    return Prepared(shape, [*spaces, queries, None, None, *rest], 4, True, by_length, module, space)


def _in_whole(wrapper: Any, known: Prepared, pages: KeptPages) -> None:
    wrapper._plan_info = known.plan(pages, known.ints[0], wrapper._pin_memory_int_workspace_buffer)
