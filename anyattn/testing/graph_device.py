"""A CPU that tells device tensors from host tensors: what a step reads back, and what it allocates.

Some tensors are said to be on the device; whatever is computed from them is too. Reading one on the host, or
copying it into a host tensor, is a wait for the device. Making one is an allocation there, and so is any
factory that is given a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.core.graph.recorder_rules import here, refused_call, refused_op
from anyattn.core.graph.recorder_steps import compiling_nothing

__all__ = ["DeviceUse", "pretending_device"]

_FACTORIES = frozenset(
    ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_strided", "rand", "randn")
)


@dataclass
class DeviceUse:
    """Filled while the block runs: waits for the device, and allocations on it, each with its line."""

    syncs: list[str] = field(default_factory=list)
    allocations: list[str] = field(default_factory=list)


class _Device:
    """Storages that are on the device, each held so that its number stays its own."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.use, self.quiet = DeviceUse(), False
        self._held: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        self._held[tensor.untyped_storage()._cdata] = tensor

    def note(self, found: list[str], operation: str, why: str = "") -> None:
        where = here()
        # Stand-ins read on the host what their library reads on the device; its copies have this name.
        if "/testing/emulators/" in Path(where.file).as_posix() and where.function != "host_copy":
            return
        found.append(f"{operation} at {where}{why and f': {why}'}")

    def has(self, value: Any) -> bool:
        return any(t.untyped_storage()._cdata in self._held for t in _tensors(value))


@contextmanager
def pretending_device(tensors: Iterable[torch.Tensor]) -> Iterator[DeviceUse]:
    """Watches the block, in which `tensors` (on the CPU) are taken for tensors on a device."""
    device = _Device(tensors)
    with compiling_nothing(), _Calls(device), _Operations(device):
        yield device.use


class _Calls(TorchFunctionMode):
    def __init__(self, device: _Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, device = kwargs or {}, self._device
        name = getattr(func, "__name__", str(func))
        if name in _FACTORIES and given.get("device") is not None:
            device.note(device.use.allocations, name)
        why = refused_call(func, args, given) if device.has((tuple(args), dict(given))) else None
        if why is None:
            return func(*args, **given)
        device.note(device.use.syncs, name, why)
        before, device.quiet = device.quiet, True
        try:
            return func(*args, **given)
        finally:
            device.quiet = before


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: _Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, device = kwargs or {}, self._device
        if not device.has((tuple(args), dict(given))):
            return func(*args, **given)
        why = _waits(func, args, given, device)
        if why is not None and not device.quiet:
            device.note(device.use.syncs, str(func), why)
        known = {t.untyped_storage()._cdata for t in _tensors((tuple(args), dict(given)))}
        out = func(*args, **given)
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in known:
                device.add(tensor)
                if not device.quiet:
                    device.note(device.use.allocations, str(func))
        return out


def _waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: _Device) -> str | None:
    if func.overloadpacket.__name__ == "copy_" and not device.has(args[0]):
        return "a copy to the host"
    return refused_op(func, args, kwargs, lambda tensor: False)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
