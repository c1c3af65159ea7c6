"""The one launch seam: every Triton kernel of the package starts here.

A graph recorder or tracer hooks it (`set_hook`). On Triton versions where that was verified, the
compiled kernel is called directly: the ordinary path costs about 40 us of host time a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

__all__ = [
    "DIRECT_VERSIONS",
    "Fixed",
    "Hook",
    "Started",
    "direct_device",
    "interpreting",
    "is_descriptor",
    "launch",
    "set_hook",
]

DIRECT_VERSIONS = ("3.6.",)
"""Triton versions whose `CompiledKernel.run` argument order was verified on a device."""

Hook = Callable[[Any, tuple[int, ...], Sequence[Any], dict[str, Any], dict[str, int]], bool]
"""`(kernel, grid, args, constexprs, options) -> handled`; True = the hook launched it itself."""

_hook: Hook | None = None
_compiled: dict[tuple[Any, ...], Any] = {}
_numbers: dict[tuple[Any, ...], int] = {}
_interpreting = bool(triton.knobs.runtime.interpret)  # read once: the knob looks at the environment
_direct = triton.__version__.startswith(DIRECT_VERSIONS) and not _interpreting
# Where tensors are on a device, it has been initialised: torch.cuda.current_device would ask again.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


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
        elif arg is None or isinstance(arg, float):
            key.append(type(arg))
        elif is_descriptor(arg):  # the launcher encodes it, address and all
            key += (arg.base.dtype, *arg.block_shape)
        else:
            key.append(type(arg))
    return values, key


class Fixed:
    """Arguments that launches share, lowered once: a layer's, a step's.

    Their tensors stay alive with it and must not move.
    """

    __slots__ = ("args", "key", "values")

    def __init__(self, *args: Any) -> None:
        values, key = _lowered(args)
        self.args, self.values = args, values
        self.key = _numbers.setdefault(tuple(key), len(_numbers))
        """Equal for arguments that a kernel is specialised on alike."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    fixed: Sequence[Fixed] = (),
    /,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **options: int,
) -> Any:
    """Start `kernel` on the current stream of the current device. Returns what it compiled to, or None.

    Args:
        args: the kernel's arguments in order, tensor descriptors among them; its constexprs come last in
            its signature.
        constexprs: by name, in signature order.
        fixed: arguments between `args` and the constexprs.
        options: further compile options (`maxnreg`, …).
    """
    if _hook is not None or not _direct:
        options = {"num_warps": num_warps, "num_stages": num_stages, **options}
        args = _all(args, fixed)
        if _hook is None or not _hook(kernel, grid, args, constexprs, options):
            kernel[grid](*args, **constexprs, **options)
        return None
    device = torch.cuda.current_device()
    values, specialised = _lowered(args)
    constants = tuple(constexprs.values())
    key = (kernel, device, num_warps, num_stages, constants, *options.values(), *specialised)
    for part in fixed:
        values += part.values
        key += (part.key,)
    compiled = _compiled.get(key)
    if compiled is None:
        options = {"num_warps": num_warps, "num_stages": num_stages, **options}
        compiled = _compiled[key] = kernel[grid](*_all(args, fixed), **constexprs, **options)
        return compiled
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, torch._C._cuda_getCurrentRawStream(device), compiled.function, compiled.packed_metadata,
        None, None, None, *values, *constants,
    )  # fmt: skip
    return compiled


def direct_device() -> int:
    """The current device where launches are direct and nobody listens, else -1."""
    return -1 if _hook is not None or not _direct else _current_device()


def _entry(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """`(run, front)`: `run(*grid, stream, *front, *args)` starts a compiled kernel.

    Triton's launcher for CUDA is a C function, and Python around it that allocates scratch memory; a kernel
    that needs none is started by the former, in half the time.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if _is_cuda_launcher(run) and not (run.global_scratch_size or run.profile_scratch_size):
        options = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (function, *options, None, None, packed, None, None, None)
    return run, (function, packed, None, None, None)


def _is_cuda_launcher(run: Any) -> bool:
    kind = type(run)
    return (kind.__module__, kind.__name__) == ("triton.backends.nvidia.driver", "CudaLauncher")


class Started:
    """A launch to be repeated with other first arguments that a kernel is specialised on alike.

    Tensors among `first` as addresses; `last`: arguments and constexprs behind them. In whole:
    `run(*grid, stream, *front, *first, *last)`.
    """

    __slots__ = ("front", "last", "run")

    def __init__(self, compiled: Any, last: Sequence[Any]) -> None:
        self.run, self.front = _entry(compiled)
        self.last = tuple(last)

    def start(self, stream: int, grid: int, *first: Any) -> None:
        """On `stream` of the current device."""
        self.run(grid, 1, 1, stream, *self.front, *first, *self.last)

    def start_rows(self, stream: int, columns: int, rows: int, *first: Any) -> None:
        """On a grid of two axes."""
        self.run(columns, rows, 1, stream, *self.front, *first, *self.last)


def _all(args: Sequence[Any], fixed: Sequence[Fixed]) -> tuple[Any, ...]:
    return (*args, *(arg for part in fixed for arg in part.args))
