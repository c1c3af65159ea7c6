"""A library's function called in every step alike, without what Python and torch do about names each time.

Of an operator with two dozen arguments, looking each name up and asking every layer of torch above the kernel
costs as much host time as all else of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

__all__ = ["positional", "repeated"]

_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
"""Dispatch keys of the devices whose kernels are called directly."""

_SEES_MODES = all(
    hasattr(torch._C, name)
    for name in ("_len_torch_dispatch_stack", "DispatchKeySet", "_dispatch_has_kernel_for_dispatch_key")
)
"""torch has what a direct call is decided by, under the names of 2.11 and 2.13."""


def repeated(call: Callable[..., Any], given: Mapping[str, Any]) -> Callable[[], Any]:
    """`call(**given)` to be made again and again, with what `given` holds now. `call`: a Python function, or
    an overload of an operator that neither differentiates nor writes to its arguments.

    Raises:
        TypeError: an operator without an argument that is given.
    """
    schema = getattr(call, "_schema", None)
    if schema is None:
        return partial(call, **given)
    arguments = positional(schema, given)
    plainly = partial(getattr(call, "_op", call), *arguments)
    kernel = _kernel(call, schema, arguments)
    if kernel is None:
        return plainly

    def run() -> Any:
        # What looks into operators, or stands in for tensors, is a mode on this stack and has to see it.
        return plainly() if torch._C._len_torch_dispatch_stack() else kernel()

    return run


def positional(schema: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """`given` in the order of an operator's schema, as far as the last one; its defaults in between.

    Raises:
        TypeError: a name that it lacks, or none for an argument without a default.
    """
    arguments, left = list[Any](), dict(given)
    for argument in schema.arguments:
        if not left:
            break
        if argument.name in left:
            arguments.append(left.pop(argument.name))
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        else:
            raise TypeError(f"{schema.name} needs {argument.name}")
    if left:
        raise TypeError(f"{schema.name} doesn't take {', '.join(left)}")
    return tuple(arguments)


def _kernel(call: Any, schema: Any, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
    """The operator's own kernel for the device of these tensors, below autograd, which has nothing to do for
    integers; None where it isn't certain that torch would choose it.
    """
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    devices = {each.device.type for each in tensors}
    key = _KEYS.get(devices.pop()) if len(devices) == 1 else None
    boxed = getattr(getattr(call, "_handle", None), "redispatch_boxed", None)
    if key is None or boxed is None or not _SEES_MODES or not all(map(_is_plain, tensors)):
        return None
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return partial(boxed, keys, *arguments)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Strided integers of torch's own class: nothing stands between them and the device's kernel."""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return type(tensor) is torch.Tensor and whole and tensor.layout is torch.strided
