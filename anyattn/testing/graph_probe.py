"""Detectors for what may not happen in a graph or between two replays: host syncs, allocation, rebinding.

Each works on CUDA by asking the device's own instruments, and on a CPU by looking at every torch call. On a
CPU, host tensors and device tensors can't be told apart, so reads and allocations of host tensors count too.
"""

from __future__ import annotations

import dataclasses
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.core.graph.recorder_rules import here, refused_call, refused_op
from anyattn.core.graph.recorder_steps import compiling_nothing, written_in_python

__all__ = [
    "Address",
    "Allocations",
    "HostSync",
    "addresses",
    "counting_allocations",
    "rebound",
    "watching_host_syncs",
]


@dataclass(frozen=True)
class HostSync:
    """A wait for the device (or a shape that needs one): the operation, why, and the line."""

    operation: str
    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.where}: {self.why}"


@contextmanager
def watching_host_syncs(device: torch.device | str) -> Iterator[list[HostSync]]:
    """Yields a list that fills with the syncs of the block.

    On a CPU the block runs to its end. On CUDA it ends at its first sync, quietly: look at the list.
    """
    found: list[HostSync] = []
    if torch.device(device).type == "cuda":
        yield from _cuda_syncs(found)
        return
    ops = _SyncOps(found)
    with compiling_nothing(), _SyncCalls(found, ops), ops:
        yield found


def _cuda_syncs(found: list[HostSync]) -> Iterator[list[HostSync]]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield found
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        if "synchroniz" not in why:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name} (`{frame.line}`)"
        found.append(HostSync(frame.line or "?", why, where))
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _SyncCalls(TorchFunctionMode):
    def __init__(self, found: list[HostSync], ops: _SyncOps) -> None:
        super().__init__()
        self._found, self._ops = found, ops

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        why = refused_call(func, args, given)
        if why is None:
            return func(*args, **given)
        self._found.append(HostSync(getattr(func, "__name__", str(func)), why, str(here())))
        before, self._ops.quiet = self._ops.quiet, True  # reported once, under the author's name
        try:
            return func(*args, **given)
        finally:
            self._ops.quiet = before


class _Watch(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """Sees every operation that a kernel serves; those written in Python are taken apart."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        python = written_in_python(func)
        if python is not None:
            with self:
                return python(*args, **given)
        return self.see(func, args, given)

    @abstractmethod
    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation and look at it."""


class _SyncOps(_Watch):  # type: ignore[no-untyped-call]
    def __init__(self, found: list[HostSync]) -> None:
        super().__init__()
        self._found, self.quiet = found, False
        self._numbers: list[torch.Tensor] = []  # held, so that no other tensor takes their place

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        why = None if self.quiet else refused_op(func, args, kwargs, self._is_number)
        if why is not None:
            self._found.append(HostSync(str(func), why, str(here())))
        out = func(*args, **kwargs)
        if func.overloadpacket.__name__ == "lift_fresh":
            self._numbers.append(out)
        return out

    def _is_number(self, tensor: torch.Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return any(key == number.untyped_storage()._cdata for number in self._numbers)


@dataclass
class Allocations:
    """Filled when the block ends: how many, bytes in all, and (on a CPU) by which lines."""

    count: int = 0
    nbytes: int = 0
    places: list[str] = field(default_factory=list)


@contextmanager
def counting_allocations(device: torch.device | str) -> Iterator[Allocations]:
    """Counts what torch allocates in the block: device memory on CUDA, any tensor on a CPU.

    CUDA: the caching allocator's own counters, so memory that it hands out again counts, and what a library
    takes from the driver by itself doesn't.
    """
    found = Allocations()
    device = torch.device(device)
    with ExitStack() as stack:
        if device.type == "cuda":
            before = _allocated(device)
        else:
            stack.enter_context(compiling_nothing())
            stack.enter_context(_NewStorages(found))
        yield found
    if device.type == "cuda":
        after = _allocated(device)
        found.count, found.nbytes = after[0] - before[0], after[1] - before[1]


def _allocated(device: torch.device) -> tuple[int, int]:
    stats = torch.cuda.memory_stats(device)
    return int(stats["allocation.all.allocated"]), int(stats["allocated_bytes.all.allocated"])


class _NewStorages(_Watch):  # type: ignore[no-untyped-call]
    def __init__(self, found: Allocations) -> None:
        super().__init__()
        self._found = found

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = {t.untyped_storage()._cdata for t in _tensors((tuple(args), dict(kwargs)))}
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.nbytes():
                known.add(storage._cdata)
                self._found.count += 1
                self._found.nbytes += storage.nbytes()
                self._found.places.append(f"{func} at {here()}")
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class Address(NamedTuple):
    """Where a tensor lies and how it is read."""

    pointer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


_LEAVES = (str, bytes, int, float, type, ModuleType, FunctionType, MethodType, torch.dtype, torch.device)


def addresses(root: Any) -> dict[str, Address]:
    """Every tensor under `root` by its path, as `tables[0].indices`.

    Looks into dataclasses, mappings, sequences and the attributes of other objects, each once. Keys that
    aren't strings or integers are numbered.
    """
    found: dict[str, Address] = {}
    seen: set[int] = set()
    open_: list[tuple[str, Any]] = [("", root)]
    while open_:
        path, value = open_.pop()
        if isinstance(value, torch.Tensor):
            found[path] = Address(value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()))
        elif value is not None and not isinstance(value, _LEAVES) and id(value) not in seen:
            seen.add(id(value))
            open_ += [(path + step, child) for step, child in _children(value)]
    return {path.removeprefix("."): found[path] for path in sorted(found)}


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for i, (key, child) in enumerate(value.items()):
            yield f"[{key if isinstance(key, (str, int)) else i}]", child
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif dataclasses.is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    else:
        yield from ((f".{name}", child) for name, child in getattr(value, "__dict__", {}).items())


def rebound(before: Mapping[str, Address], after: Mapping[str, Address]) -> list[str]:
    """What differs between two snapshots: a graph that read the first would go on reading it."""
    lines = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            lines.append(f"{path or 'the tensor'} {'appeared' if old is None else 'is gone'}")
        elif old.pointer != new.pointer:
            lines.append(f"{path or 'the tensor'} moved to other memory")
        elif old != new:
            lines.append(f"{path or 'the tensor'} changed: {old[1:]} became {new[1:]}")
    return lines
