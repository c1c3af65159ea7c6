"""AITER's own Triton `unified_attention` in Triton's interpreter, from the sources of an `amd-aiter`.

The package itself raises where ROCm is missing, so its kernel is loaded beside empty parents; what it asks of
the device (number of compute units, kind of fp8) is answered for an MI300X.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["sources", "unified_attention"]

_TRITON = "aiter.ops.triton"


def sources() -> Path | None:
    """Folder `aiter` of the installed distribution, or None."""
    try:
        found = metadata.distribution("amd-aiter").locate_file("aiter")
    except metadata.PackageNotFoundError:
        return None
    root = Path(str(found))
    return root if (root / "ops/triton/unified_attention.py").is_file() else None


def unified_attention(root: Path) -> Callable[..., Any]:
    """The function, interpreted; needs `TRITON_INTERPRET=1` before Triton is imported."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "aiter"}
    for name in before:
        del sys.modules[name]
    for name in ("aiter", "aiter.ops", _TRITON, f"{_TRITON}._triton_kernels", f"{_TRITON}.utils"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name, values in (
        (f"{_TRITON}.utils.types", {"e4m3_dtype": torch.float8_e4m3fnuz}),
        (f"{_TRITON}.utils.device_info", {"get_num_sms": lambda: 304}),
    ):
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    try:
        found: Callable[..., Any] = importlib.import_module(f"{_TRITON}.unified_attention").unified_attention
        return found
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        sys.modules.update(before)
