"""Functions of AITER, wherever the installed version has them, and how its versions differ: by signature.

Read in amd-aiter 0.1.7.post2.dev18 (PyPI, 2025-11) and ROCm/aiter main (2026-08, v0.1.20 and later).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from anyattn.errors import BackendBuildError

__all__ = ["library_function", "names_of", "optional", "unified_attention", "varlen_function"]

_UNIFIED = ("aiter.ops.triton.attention.unified_attention", "aiter.ops.triton.unified_attention")
"""Where main keeps it, and where the PyPI build does."""


def library_function(backend: str, module: str, name: str, *needed: str) -> Callable[..., Any]:
    """A function of `module`, whose parameters include `needed`.

    Raises:
        BackendBuildError: this build has no such function, or one without those parameters.
    """
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise BackendBuildError(
            f"{backend} calls {module}.{name}",
            asked="an AITER without it",
            allowed="amd-aiter >= 0.1.7.dev0, or ROCm/aiter main",
            hint="`anyattn doctor` says which build is installed",
        )
    function: Callable[..., Any] = found
    missing = sorted(set(needed) - names_of(function))
    if missing:
        raise BackendBuildError(
            f"{module}.{name} of this build lacks what {backend} passes",
            asked=", ".join(missing),
            allowed=", ".join(sorted(names_of(function))),
            hint="build ROCm/aiter main: the PyPI wheel is older",
        )
    return function


def unified_attention(backend: str, *needed: str) -> Callable[..., Any]:
    """AITER's Triton `unified_attention`. Raises `BackendBuildError` where this build has none."""
    for path in _UNIFIED:
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        return library_function(backend, path, "unified_attention", *needed)
    raise BackendBuildError(
        f"{backend} calls AITER's Triton unified_attention",
        asked="an AITER without it",
        allowed=" or ".join(_UNIFIED),
        hint="amd-aiter >= 0.1.7.dev0, or ROCm/aiter main",
    )


def varlen_function(backend: str) -> Callable[..., Any]:
    """`flash_attn_varlen_func`, taking windows as `(left, right)`: main's has a third number, sink tokens.

    Raises:
        BackendBuildError: this build has none.
    """
    function = library_function(backend, "aiter.ops.mha", "flash_attn_varlen_func", "return_lse", "out")
    default = inspect.signature(function).parameters["window_size"].default
    more = (0,) * (len(default) - 2)

    def call(*args: Any, window_size: tuple[int, int] = (-1, -1), **values: Any) -> Any:
        return function(*args, window_size=(*window_size, *more), **values)

    return call


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def optional(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those of `values` that this version of the function takes."""
    names = names_of(function)
    return {name: value for name, value in values.items() if name in names}
