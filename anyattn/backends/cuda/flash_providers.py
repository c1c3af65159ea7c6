"""FlashAttention-3 and -4 by who ships them: one calling convention over signatures that differ.

Arguments are named once here (`ALIASES`) and looked up in each function's own signature, so a build that
renames, reorders or lacks one is told apart by what it takes, not by its version.
Signatures read: flash_attn_interface of tokenspeed-fa3 3.0.0.post20260810 and the schema of its operator,
flash_attn/cute/interface.py of flash-attn-4 4.0.0b36; sgl_kernel.flash_attn and vllm.vllm_flash_attn as their
engines call them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from anyattn.core.facts import LibraryFacts
from anyattn.core.rows import aligned
from anyattn.errors import FeatureError, LibraryError

__all__ = ["ALIASES", "FlashFunction", "FlashLibrary", "load_flash"]

MODULES = {
    "tokenspeed-fa3": "flash_attn_interface",
    "sglang-kernel": "sgl_kernel.flash_attn",
    "sgl-kernel": "sgl_kernel.flash_attn",
    "vllm": "vllm.vllm_flash_attn",
    "flash-attn-4": "flash_attn.cute",
    "tokenspeed-fa4": "flash_attn.cute",
}
"""The module of each distribution that ships these kernels."""

ALIASES: dict[str, tuple[str, ...]] = {
    "table": ("page_table", "block_table"),
    "used": ("cache_seqlens", "seqused_k"),
    "cu_q": ("cu_seqlens_q",),
    "cu_k": ("cu_seqlens_k",),
    "max_q": ("max_seqlen_q",),
    "max_k": ("max_seqlen_k",),
    "scale": ("softmax_scale",),
    "causal": ("causal", "is_causal"),
    "window": ("window_size",),
    "window_left": ("window_size_left",),
    "window_right": ("window_size_right",),
    "cap": ("softcap",),
    "splits": ("num_splits",),
    "metadata": ("scheduler_metadata",),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "qv": ("qv", "q_v"),
    "k_descale": ("k_descale",),
    "v_descale": ("v_descale",),
    "out": ("out",),
    "lse": ("return_softmax_lse", "return_lse", "return_attn_probs"),
    "implementation": ("fa_version",),
    "heads_q": ("num_heads_q", "num_heads"),
    "heads_kv": ("num_heads_kv", "num_heads_k"),
}
"""Our name of an argument, and what builds call it."""


class FlashFunction:
    """One function of a build with the names that it gives to our arguments.

    `rectangular`: without query offsets it takes `q [B, n, Hq, D]`, n tokens of every request.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        parameters: Iterable[str],
        *,
        version: int = 3,
        rectangular: bool = False,
    ) -> None:
        have = set(parameters)
        self.call, self.version, self.rectangular = call, version, rectangular
        self.names = {
            ours: next(name for name in theirs if name in have)
            for ours, theirs in ALIASES.items()
            if not have.isdisjoint(theirs)
        }
        self._out, self._lse = self.names.get("out"), self.names.get("lse")
        self._constant = {"fa_version": version} if "implementation" in self.names else {}

    @staticmethod
    def of(call: Callable[..., Any], *, version: int = 3, rectangular: bool = False) -> FlashFunction:
        """From a Python function, by its signature."""
        names = inspect.signature(call).parameters
        return FlashFunction(call, names, version=version, rectangular=rectangular)

    def bind(self, *, window: tuple[int, int] | None = None, **given: Any) -> dict[str, Any]:
        """Keyword arguments under the function's own names, for all layers of a step; None is left out.

        `window`: keys to the left and right of a query's own, -1 = all.

        Raises:
            FeatureError: something that this build's function doesn't take.
        """
        if window is not None and "window_left" in self.names:
            given |= {"window_left": window[0], "window_right": window[1]}
        elif window is not None:
            given["window"] = window if self.version == 3 else tuple(None if w < 0 else w for w in window)
        bound = dict(self._constant)
        for name, value in given.items():
            if value is None:
                continue
            if name not in self.names:
                raise _lacks(self.call, name, ", ".join(self.names))
            bound[self.names[name]] = value
        return bound

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound: dict[str, Any],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        given: Mapping[str, torch.Tensor] = MappingProxyType({}),
        *,
        may_replace: bool = False,
    ) -> torch.Tensor:
        """Attend: `q [T, Hq, D]`, paged or ragged `k`, `v`. Writes `out [T, Hq, Dv]` and, unless None,
        the natural-log `lse [T, Hq]`. Returns `out`; with `may_replace`, the library's own result where it
        writes into no other: that saves a copy.

        `bound` is of `bind` and isn't changed; without query offsets every request has one query. `given`:
        sinks, qv, k_descale, v_descale of the layer.
        """
        single, wanted = self.rectangular and self.names["cu_q"] not in bound, out
        if single:
            q, out = q[:, None], out[:, None]
        arguments = bound.copy()
        for name, value in given.items():
            arguments[self.names[name]] = value
        # fp8 inputs give bf16; another dtype, or rows that vector stores can't reach, are copied.
        inner = self._out is not None and out.is_contiguous() and out.dtype == _result_dtype(q)
        if inner:
            arguments[self._out] = out  # type: ignore[index]
        if lse is not None and self._lse is not None:
            arguments[self._lse] = True
        result = self.call(aligned(q), k, v, **arguments)
        if inner and lse is None:
            return wanted
        values: tuple[torch.Tensor, ...] = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        if not inner and may_replace and values[0].dtype == out.dtype:
            wanted = values[0][:, 0] if single else values[0]
        elif not inner:
            out.copy_(values[0])
        if lse is not None:
            raw = values[1]
            if single:
                lse.copy_(raw[..., 0])
            else:
                lse.copy_(raw if self.version == 4 and "qv" in given else raw.t())
        return wanted


def _result_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.itemsize == 1 else q.dtype


def _lacks(call: Callable[..., Any], name: str, allowed: str) -> FeatureError:
    return FeatureError(
        f"{getattr(call, '__module__', '')}.{getattr(call, '__name__', call)} doesn't take this",
        asked=" / ".join(ALIASES[name]),
        allowed=allowed,
        hint="install a newer build, or choose another backend",
    )


@dataclass(frozen=True, eq=False)
class FlashLibrary:
    """The functions of one build.

    Attributes:
        version: 3 or 4. paged: K and V `[pages, P, Hkv, D]` through a page table. ragged: `[n, Hkv, D]` with
            offsets. schedule: work of a step's tiles ahead of its layers, where the build has it.
        sink_dtype: the one dtype that its sinks have, None = any.
    """

    version: int
    paged: FlashFunction
    ragged: FlashFunction
    schedule: FlashFunction | None
    sink_dtype: torch.dtype | None


def load_flash(provider: LibraryFacts | None, version: int) -> FlashLibrary:
    """Import the build that serves.

    Raises:
        LibraryError: no provider, an unknown one, or a module without the functions.
        ImportError and whatever else the vendor's import raises.
    """
    name = None if provider is None else provider.distribution
    if name not in MODULES:
        raise LibraryError(
            f"nothing here ships FlashAttention-{version}",
            asked=name,
            allowed=", ".join(MODULES),
            hint="`anyattn doctor` says which to install",
        )
    module = importlib.import_module(MODULES[name])
    varlen = getattr(module, "flash_attn_varlen_func", None)
    if varlen is None:
        raise LibraryError(
            f"{module.__name__} of {name} has no flash_attn_varlen_func",
            asked=f"{name} {'' if provider is None else provider.version or ''}".strip(),
            allowed="a build with it",
            hint=f"reinstall {name}; another distribution may own the module",
        )
    ragged = FlashFunction.of(varlen, version=version)
    if version == 4:
        return FlashLibrary(4, ragged, ragged, None, None)
    cached = getattr(module, "flash_attn_with_kvcache", None)
    # sglang-kernel's varlen function takes a page table too, and doesn't look at it.
    paged = ragged if cached is None else FlashFunction.of(cached, rectangular=True)
    operator = _operator(module)
    if operator is not None:
        paged = ragged = operator
    schedule = getattr(module, "get_scheduler_metadata", None) if "metadata" in paged.names else None
    planned = None if schedule is None else _scheduler(module) or FlashFunction.of(schedule)
    return FlashLibrary(3, paged, ragged, planned, torch.bfloat16)


def _overload(module: ModuleType, name: str) -> tuple[Callable[..., Any], list[str]] | None:
    """An operator of the library `flash_attn_3` that the module has loaded, and names of its arguments."""
    call = getattr(getattr(getattr(module, "flash_attn_3_gpu", None), name, None), "default", None)
    schema = getattr(call, "_schema", None)
    return None if call is None or schema is None else (call, [each.name for each in schema.arguments])


def _operator(module: ModuleType) -> FlashFunction | None:
    """`flash_attn_3::fwd` itself where its schema is the one we know: the Python function around it can't
    write into `out`, which would cost every layer a copy."""
    found = _overload(module, "fwd")
    if found is None:
        return None
    call, names = found
    function = FlashFunction(call, names, rectangular=True)
    needed = {"table", "cu_q", "cu_k", "max_q", "max_k", "scale", "causal", "window_left", "sinks", "out"}
    knows_k = {"seqused_k", "num_splits", "scheduler_metadata"} <= set(names)
    return function if needed <= function.names.keys() and knows_k else None


_SCHEDULED = frozenset(
    ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v",
     "qkv_dtype", "seqused_k", "cu_seqlens_q", "page_size", "is_causal", "window_size_left",
     "window_size_right", "has_softcap", "num_splits")
)  # fmt: skip
"""Arguments of the schedule that we give; all others have defaults."""


def _scheduler(module: ModuleType) -> FlashFunction | None:
    """`flash_attn_3::get_scheduler_metadata` itself where its schema is the one we know: it is called in each
    step, and the Python function around it looks at nothing that isn't known already."""
    found = _overload(module, "get_scheduler_metadata")
    if found is None or not _SCHEDULED.issubset(found[1]):
        return None
    return FlashFunction(*found)
