"""The one launch seam: every Triton kernel of the package starts here.

A graph recorder or tracer hooks it (`set_hook`). On Triton versions where that was verified, the
compiled kernel is called directly: the ordinary path costs about 40 us of host time a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

__all__ = ["DIRECT_VERSIONS", "Hook", "interpreting", "launch", "set_hook"]

DIRECT_VERSIONS = ("3.6.",)
"""Triton versions whose `CompiledKernel.run` argument order was verified on a device."""

Hook = Callable[[Any, tuple[int, ...], Sequence[Any], dict[str, Any], dict[str, int]], bool]
"""`(kernel, grid, args, constexprs, options) -> handled`; True = the hook launched it itself."""

_hook: Hook | None = None
_compiled: dict[tuple[Any, ...], Any] = {}
_direct = triton.__version__.startswith(DIRECT_VERSIONS)


def interpreting() -> bool:
    """True if kernels run in Triton's interpreter (decided when they were decorated)."""
    return bool(triton.knobs.runtime.interpret)


def set_hook(hook: Hook | None) -> Hook | None:
    """Install a recorder or tracer; returns the previous one."""
    global _hook
    previous, _hook = _hook, hook
    return previous


def _specialisation(arg: Any) -> Any:
    """What Triton's JIT keys a compiled kernel on, for one argument."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, -(1 << 31) <= arg < (1 << 31)
    return type(arg)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: int,
) -> None:
    """Start `kernel` on the current stream of the current device.

    Args:
        args: the kernel's arguments in order; its constexprs come last in its signature.
        constexprs: by name, in signature order.
        options: further compile options (`maxnreg`, …).
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    if _hook is not None and _hook(kernel, grid, args, constexprs, options):
        return
    if not _direct or interpreting():
        kernel[grid](*args, **constexprs, **options)
        return
    device = torch.cuda.current_device()
    key = (
        kernel, device, tuple(constexprs.values()), tuple(options.values()),
        tuple([_specialisation(a) for a in args]),
    )  # fmt: skip
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constexprs, **options)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *args, *constexprs.values(),
    )  # fmt: skip
