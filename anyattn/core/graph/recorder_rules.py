"""What a captured body may not do: host syncs and shapes that depend on device values, by torch operation.

A dispatch mode sees what reaches a kernel; a function mode sees what never does on a CPU (`.tolist()`,
`.cpu()`), under the name that the author wrote. Both are needed: neither sees everything.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from anyattn.errors import GraphError

__all__ = ["Where", "here", "refusal", "refused_call", "refused_op"]

_SKIPPED = re.compile(
    r"(torch|contextlib|anyattn\.core\.graph\.recorder.*|anyattn\.testing\.graph_(probe|device))(\..*)?"
)
_READS = frozenset(
    ("item", "tolist", "numpy", "cpu", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__",
     "__index__", "__complex__", "__array__", "__contains__", "__repr__", "__format__")
)  # fmt: skip
_FROM_HOST = frozenset(("tensor", "as_tensor", "new_tensor", "asarray"))
_SYNC = "it reads a device value on the host"
_SHAPE = "the shape of its result depends on device values"
_UNSEEN = "the kernel that it starts is unseen here; start it through record_call (a seam of the platform)"
_NUMBER = "a number stored to one element is a copy that the host waits for; use x[i : i + 1].fill_(number)"
_COPY = "it copies Python values to the device, and waits"


@dataclass(frozen=True)
class Where:
    """A line of the body."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
        code = linecache.getline(self.file, self.line).strip()
        return f"{short}:{self.line} in {self.function}" + (f" (`{code}`)" if code else "")


def here() -> Where:
    """The innermost line that belongs neither to torch nor to the recorder."""
    frame = _author()
    return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _author() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and _SKIPPED.fullmatch(_module(frame)):
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def refusal(operation: str, why: str, where: Where) -> GraphError:
    """The error for an operation that no graph can hold."""
    return GraphError(
        f"{operation} can't be captured: {why}",
        asked=f"{operation} at {where}",
        allowed="device work of static shape",
        hint="move it to init_forward_metadata_out_graph, or keep the value on the device "
        "(`anyattn lint` finds such lines)",
    )


def refused_op(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_number: Callable[[torch.Tensor], bool]
) -> str | None:
    """Why an operation seen by a dispatch mode can't be captured; None = it can.

    `is_number`: was this tensor made from a Python number (`lift_fresh`)? On a device it isn't there yet.
    """
    name = func.overloadpacket.__name__
    if name == "copy_" and is_number(args[1]):
        return _NUMBER
    if name == "index":
        return _SHAPE if _has_mask(args[1]) else None
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        # A Python number is a masked fill; anything else is counted against the mask first.
        return _SHAPE if _has_mask(args[1]) and not is_number(args[2]) else None
    if name == "repeat_interleave" and func._overloadname != "self_int":
        return None if kwargs.get("output_size") is not None else f"{_SHAPE}; give output_size"
    if kwargs.get("generator") is not None:
        return "a generator of its own isn't registered with the graph; use the default one"
    if torch.Tag.data_dependent_output in func.tags:
        return _SYNC
    return _SHAPE if torch.Tag.dynamic_output_shape in func.tags else None


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _starts_kernels(module: str) -> bool:
    """Triton reads addresses when it launches, and when a tensor descriptor is made, which starts nothing."""
    return module.startswith("triton.") and not module.startswith(("triton.tools.", "triton.experimental."))


def refused_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call seen by a function mode can't be captured; None = it can."""
    name = getattr(func, "__name__", "")
    if name in _READS:
        return _SYNC
    if name == "data_ptr" and _starts_kernels(_module(_author())):
        return _UNSEEN
    if name == "to" and ("cpu" in (*args[1:], kwargs.get("device"))):
        return _SYNC
    if name in _FROM_HOST:
        data = args[-1] if args else kwargs.get("data")
        if name == "tensor" or not isinstance(data, torch.Tensor):
            return _COPY
    if name == "tensor_split" and any(isinstance(x, torch.Tensor) for x in (*args[1:], *kwargs.values())):
        return _SHAPE
    return None
