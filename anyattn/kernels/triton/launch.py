"""The one launch seam: every Triton kernel of the package starts here.

A graph recorder or tracer hooks it (`set_hook`). On Triton versions where that was verified, the
compiled kernel is called directly: the ordinary path costs about 40 us of host time a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

__all__ = ["DIRECT_VERSIONS", "Hook", "interpreting", "is_descriptor", "launch", "set_hook"]

DIRECT_VERSIONS = ("3.6.",)
"""Triton versions whose `CompiledKernel.run` argument order was verified on a device."""

Hook = Callable[[Any, tuple[int, ...], Sequence[Any], dict[str, Any], dict[str, int]], bool]
"""`(kernel, grid, args, constexprs, options) -> handled`; True = the hook launched it itself."""

_hook: Hook | None = None
_compiled: dict[tuple[Any, ...], Any] = {}
_interpreting = bool(triton.knobs.runtime.interpret)  # read once: the knob looks at the environment
_direct = triton.__version__.startswith(DIRECT_VERSIONS) and not _interpreting


def interpreting() -> bool:
    """True if kernels run in Triton's interpreter (decided when they were decorated)."""
    return _interpreting


def set_hook(hook: Hook | None) -> Hook | None:
    """Install a recorder or tracer; returns the previous one."""
    global _hook
    previous, _hook = _hook, hook
    return previous


def is_descriptor(arg: Any) -> bool:
    """A tensor descriptor, Triton's or Gluon's: its `base` is a tensor."""
    return hasattr(arg, "block_shape")


def _lowered(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """`(values, key)`: arguments as the driver takes them (tensors as addresses, which saves the launcher a
    Python call each), and what Triton's JIT specialises a kernel on.
    """
    values: list[Any] = []
    key: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            values.append(address)
            key += (arg.dtype, address & 15 == 0)
            continue
        values.append(arg)
        if isinstance(arg, int):
            key.append((arg == 1) + 2 * (arg & 15 == 0) + 4 * (not -0x80000000 <= arg < 0x80000000))
        elif is_descriptor(arg):  # the launcher encodes it, address and all
            key += (arg.base.dtype, *arg.block_shape)
        else:
            key.append(type(arg))
    return values, key


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
        args: the kernel's arguments in order, tensor descriptors among them; its constexprs come last in
            its signature.
        constexprs: by name, in signature order.
        options: further compile options (`maxnreg`, …).
    """
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    if _hook is not None and _hook(kernel, grid, args, constexprs, options):
        return
    if not _direct:
        kernel[grid](*args, **constexprs, **options)
        return
    device = torch.cuda.current_device()
    values, specialised = _lowered(args)
    key = (kernel, device, *constexprs.values(), *options.values(), *specialised)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **constexprs, **options)
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, torch._C._cuda_getCurrentRawStream(device), compiled.function, compiled.packed_metadata,
        None, None, None, *values, *constexprs.values(),
    )  # fmt: skip
