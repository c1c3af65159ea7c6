"""FlashInfer's MHA wrappers: made once, lent to one plan at a time, and kept for a graph's lifetime.

A wrapper holds what its last `plan` made (an int workspace of 8 MiB on the device), so each living `Plan`
needs wrappers of its own; they come back when the plan is dropped. The float workspace is written and read
within one `run`: all wrappers of a backend share it, on one stream. Pinned memory is shared, too (`Staging`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch

from anyattn.backends.cuda.flashinfer_staging import Staging
from anyattn.core.plan import Plan, Table
from anyattn.core.streams import EventRecorder

__all__ = ["Lease", "Role", "WrapperKind", "Wrappers"]

_INT_WORKSPACE = 8 << 20  # what a wrapper allocates for itself


class Role(Enum):
    """Which class: `BatchDecodeWithPagedKVCacheWrapper`, `BatchPrefillWithPagedKVCacheWrapper`,
    `BatchPrefillWithRaggedKVCacheWrapper`, `BatchAttentionWithAttentionSinkWrapper`."""

    DECODE = "decode"
    PAGED = "paged"
    RAGGED = "ragged"
    SINKS = "sinks"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call


class WrapperKind(NamedTuple):
    """What is fixed when a wrapper is made. The last four: the sink wrapper builds its kernel at once."""

    role: Role
    inner: str
    tensor_cores: bool = False
    head_dim: int = 0
    v_head_dim: int = 0
    dtype: torch.dtype | None = None
    window_left: int = -1


class Wrappers:
    """Makes wrappers and lends them out."""

    def __init__(self, library: Any, layout: str, workspace: torch.Tensor) -> None:
        """`library`: the module `flashinfer`. `workspace`: uint8, zero, shared by all wrappers."""
        self._library, self._layout, self._workspace = library, layout, workspace
        self._free: dict[tuple[WrapperKind, int], list[Any]] = {}
        self._int_workspaces: dict[Any, torch.Tensor] = {}
        device = workspace.device
        self.version: str = getattr(library, "__version__", "unknown")
        self.staging = Staging(EventRecorder(device) if device.type == "cuda" else None)
        self.plan = self.staging.plan
        """`plan(wrapper, …)`: the wrapper's own `plan`, with memory that is free for it."""

    def take(self, kind: WrapperKind, slot: int) -> Any:
        """A wrapper that no living plan uses; the last one that the same slot had, where there is one."""
        free = self._free.get((kind, slot))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # some plans write to tensors of the wrapper's own
            return self._make(kind, {})

    def give_back(self, taken: list[tuple[WrapperKind, int, Any]]) -> None:
        """Lent wrappers, once their plan is gone. What still reads one's work lists is ahead of its next
        plan's copy, on the same stream.
        """
        for kind, slot, wrapper in taken:
            self._free.setdefault((kind, slot), []).append(wrapper)

    def capture(self, kind: WrapperKind, slot: int, plan: Plan, table: Table | None) -> Any:
        """A wrapper on the captured plan's own buffers, which is that plan's for good.

        Graphs of one slot share an int workspace: each replay plans first, on the same stream.
        """
        ints = self._int_workspaces.get((kind, slot))
        with torch.inference_mode(False):
            wrapper = self._make(kind, _graph_buffers(kind, plan, table))
            if ints is None:
                ints = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self._workspace.device)
                self._int_workspaces[kind, slot] = ints
        wrapper.reset_workspace_buffer(self._workspace, ints)
        return wrapper

    def _make(self, kind: WrapperKind, buffers: Mapping[str, Any]) -> Any:
        library, workspace = self._library, self._workspace
        if kind.role is Role.DECODE:
            return library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, self._layout, use_tensor_cores=kind.tensor_cores, backend=kind.inner, **buffers
            )
        if kind.role is Role.PAGED:
            return library.BatchPrefillWithPagedKVCacheWrapper(
                workspace, self._layout, backend=kind.inner, **buffers
            )
        if kind.role is Role.RAGGED:  # k and v of a step are token-major whatever the pool's layout
            return library.BatchPrefillWithRaggedKVCacheWrapper(
                workspace, "NHD", backend=kind.inner, **buffers
            )
        return library.BatchAttentionWithAttentionSinkWrapper(
            workspace, self._layout, backend=kind.inner, q_data_type=kind.dtype, kv_data_type=kind.dtype,
            head_dim_qk=kind.head_dim, head_dim_vo=kind.v_head_dim, window_left=kind.window_left, **buffers,
        )  # fmt: skip


class Lease:
    """The wrappers of one step. They go back when the object dies, with its `Plan`."""

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._taken: list[tuple[WrapperKind, int, Any]] = []

    def take(self, kind: WrapperKind, slot: int) -> Any:
        """As `Wrappers.take`, until this lease ends."""
        wrapper = self._wrappers.take(kind, slot)
        self._taken.append((kind, slot, wrapper))
        return wrapper

    def __del__(self) -> None:
        self._wrappers.give_back(self._taken)


def _graph_buffers(kind: WrapperKind, plan: Plan, table: Table | None) -> dict[str, Any]:
    """Constructor arguments of graph mode: the step's own tensors, whose addresses are stable.

    `plan` copies its host arrays there; the compiler's device half writes the same values.
    """
    if kind.role is Role.RAGGED:
        offsets = plan.query_offsets
        return {"use_cuda_graph": True, "qo_indptr_buf": offsets, "kv_indptr_buf": offsets}
    assert table is not None
    indptr, indices = table.csr
    room = indices.untyped_storage().nbytes() // indices.element_size()
    tables = {
        "paged_kv_indptr": indptr,
        "paged_kv_indices": indices.as_strided((room,), (1,), 0),
        "paged_kv_last_page_len": table.last_page_len,
    }
    ending = "_buffer" if kind.role is Role.DECODE else "_buf"
    buffers: dict[str, Any] = {name + ending: tensor for name, tensor in tables.items()}
    if kind.role is not Role.DECODE:
        buffers["qo_indptr_buf"] = plan.query_offsets
    return {"use_cuda_graph": True, **buffers}
