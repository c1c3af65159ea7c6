"""Stand-ins of vendor libraries in the CPU recorder: each call into one is a single opaque step of the graph.

A stand-in reads lengths on the host, where the real kernel reads them on the device. So while a graph is
recorded, a call becomes one step on the tensors that it was given, as a launch is; a replay makes the same
call on the same memory. What a stand-in's object remembers on the host (a wrapper's plan) is read anew at a
replay: that the real library keeps it in device memory only a run on the hardware shows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from anyattn.core.capturing import is_capturing
from anyattn.core.graph.recorder import record_call
from anyattn.testing.emulators import Emulator, install

__all__ = ["install_recordable", "make_recordable", "opaque"]


def make_recordable(modules: Mapping[str, ModuleType]) -> None:
    """Wrap every function, every method and every operator of these modules (a stand-in's), in place."""
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                setattr(module, name, opaque(value))
            elif inspect.isclass(value):
                _wrap_methods(value)
            elif isinstance(value, SimpleNamespace):
                _wrap_operators(value)


def _wrap_methods(owner: type) -> None:
    if not owner.__module__.startswith("anyattn.testing.emulators"):
        return
    for name, value in list(vars(owner).items()):
        if isinstance(value, FunctionType) and (name == "__call__" or not name.startswith("__")):
            setattr(owner, name, opaque(value))


def _wrap_operators(namespace: SimpleNamespace) -> None:
    """`torch.ops`-like packets: what their overloads are instances of."""
    for packet in vars(namespace).values():
        for overload in (packet, getattr(packet, "default", None)):
            if isinstance(overload, FunctionType):
                continue
            _wrap_methods(type(overload))


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, one step of a graph that is recorded; new tensors that it returns become the graph's."""
    if hasattr(function, "__anyattn_opaque__"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_capturing(torch.device("cpu")) or _inside[0]:
            return function(*args, **kwargs)
        return _recorded(function, args, kwargs)

    call.__anyattn_opaque__ = True  # type: ignore[attr-defined]
    return call


_inside = [False]


def _unseen(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run without the recorder looking."""
    before, _inside[0] = _inside[0], True
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            return function(*args, **kwargs)
    finally:
        _inside[0] = before


def _recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    result = _unseen(function, args, kwargs)
    given: list[torch.Tensor] = []
    frozen = _map((args, kwargs), given.append)
    known = {t.untyped_storage()._cdata: t for t in given}
    fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
    kept = [torch.empty(t.shape, dtype=t.dtype) for t in fresh]
    places = len(given)

    def step(*tensors: torch.Tensor) -> None:
        inputs, outputs = iter(tensors[:places]), tensors[places:]
        again_args, again_kwargs = _fill(frozen, inputs)
        again = _unseen(function, again_args, again_kwargs)
        own = {t.untyped_storage()._cdata for t in tensors[:places]}
        made = [t for t in _tensors(again) if t.untyped_storage()._cdata not in own]
        for target, value in zip(outputs, made, strict=True):
            target.copy_(value)

    record_call(step, [*given, *kept], f"stand-in {function.__qualname__}")
    handed = {id(t): k for t, k in zip(fresh, kept, strict=True)}
    return _exchange(result, handed)


class _Hole:
    """Where a tensor stood among the arguments: the step may hold none."""


def _map(value: Any, see: Callable[[torch.Tensor], None]) -> Any:
    if isinstance(value, torch.Tensor):
        see(value)
        return _Hole()
    if type(value) in (tuple, list):
        return type(value)(_map(x, see) for x in value)
    if isinstance(value, dict):
        return {k: _map(x, see) for k, x in value.items()}
    return value


def _fill(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Hole):
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(_fill(x, tensors) for x in value)
    if isinstance(value, dict):
        return {k: _fill(x, tensors) for k, x in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for x in value for t in _tensors(x)] if isinstance(value, (tuple, list)) else []


def _exchange(value: Any, handed: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return handed.get(id(value), value)
    if isinstance(value, (tuple, list)):
        return type(value)(_exchange(x, handed) for x in value)
    return value


def install_recordable(name: str, host: str | None = None, *, latent: bool = False) -> Emulator:
    """`emulators.install`, and what it installed may be called inside a recorded graph.

    Raises:
        UnknownNameError: no such emulator.
    """
    emulator = install(name, host, latent=latent)
    roots = {module.partition(".")[0] for module in emulator.modules()}
    make_recordable({n: m for n, m in list(sys.modules.items()) if n.partition(".")[0] in roots})
    return emulator
