"""Which memory a recording touches: frozen addresses outside, a pool of its own inside.

A storage is known by its number in the recording. The recording holds weak references, so it keeps nothing
from outside alive, and a number can't be taken by another storage that happens to get the same address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anyattn.core.graph.recorder_rules import Where
from anyattn.errors import GraphError

__all__ = ["Memory", "Ref", "Tracked", "build", "spoil"]


class Ref(NamedTuple):
    """A tensor as a graph remembers it: storage number, dtype, size, stride and offset."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Tracked:
    """One storage. `inside`: allocated during the capture. `kept`: what the graph owns, after the capture."""

    weak: StorageWeakRef
    address: int
    nbytes: int
    inside: bool
    first: str
    last_use: int = -1
    kept: torch.UntypedStorage | None = None
    constant: bool = False


class Memory:
    """All storages of one recording, in the order in which they appeared."""

    def __init__(self) -> None:
        self.tracked: list[Tracked] = []
        self._numbers: dict[int, int] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Has this storage appeared before?"""
        return _key(tensor) in self._numbers

    def ref(self, tensor: torch.Tensor, operation: str, where: Where, *, inside: bool = False) -> Ref:
        """How the recording remembers `tensor`. Raises `GraphError` for what has no plain storage here."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj():
            raise GraphError(
                f"the CPU recorder can't hold this operand of {operation}",
                asked=f"{tensor.layout} on {tensor.device} at {where}",
                allowed="strided tensors on the CPU",
                hint="capture on the tensor's own platform",
            )
        number = self._numbers.get(_key(tensor))
        if number is None:
            number = self._track(tensor, operation, where, inside)
        return Ref(
            number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def _track(self, tensor: torch.Tensor, operation: str, where: Where, inside: bool) -> int:
        storage = tensor.untyped_storage()
        first = f"{tensor.dtype} {list(tensor.shape)}, first used by {operation} at {where}"
        self._numbers[_key(tensor)] = len(self.tracked)
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.tracked.append(Tracked(weak, storage.data_ptr(), storage.nbytes(), inside, first))
        return len(self.tracked) - 1

    def keep_constant(self, tensor: torch.Tensor, where: Where) -> None:
        """A Python number as a 0-dim tensor: part of the kernel's arguments, so the graph owns it."""
        tracked = self.tracked[self.ref(tensor, "a Python number", where, inside=True).storage]
        tracked.kept, tracked.constant = tensor.untyped_storage(), True

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Was it given to `keep_constant`?"""
        number = self._numbers.get(_key(tensor))
        return number is not None and self.tracked[number].constant

    def finish(self) -> None:
        """After the body: what it allocated and somebody still holds becomes the graph's own."""
        for tracked in self.tracked:
            if tracked.inside and tracked.kept is None:
                tracked.kept = _alive(tracked)

    def resolve(self) -> list[torch.UntypedStorage | None]:
        """Storages by number, before anything runs; None = made during the replay.

        Raises:
            GraphError: memory from outside that is gone, or has moved.
        """
        return [t.kept if t.inside else _outside(t) for t in self.tracked]

    def own(self) -> list[torch.UntypedStorage]:
        """Memory of the pool that stays between replays."""
        return [t.kept for t in self.tracked if t.kept is not None and not t.constant]

    def peak_bytes(self, born: Sequence[int]) -> int:
        """Most bytes that temporaries take at once; `born[i]`: the step that makes storage i."""
        changes: list[tuple[int, int]] = []
        for number, tracked in enumerate(self.tracked):
            if tracked.inside and tracked.kept is None:
                changes += [(2 * born[number], tracked.nbytes), (2 * tracked.last_use + 1, -tracked.nbytes)]
        most = now = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most


def build(ref: Ref, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor that `ref` describes, on `storage`."""
    return torch.empty(0, dtype=ref.dtype, device="cpu").set_(storage, ref.offset, ref.size, ref.stride)


def spoil(storage: torch.UntypedStorage) -> None:
    """255 in every byte: NaN in every float type, -1 in integers."""
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).fill_(255)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _alive(tracked: Tracked) -> torch.UntypedStorage | None:
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(tracked.weak.cdata)
    return storage


def _outside(tracked: Tracked) -> torch.UntypedStorage:
    storage = _alive(tracked)
    if storage is not None and storage.data_ptr() == tracked.address:
        return storage
    raise GraphError(
        "the graph would read freed memory" if storage is None else "memory that the graph reads has moved",
        asked=tracked.first,
        allowed="the tensors that were there during the capture: a graph keeps nothing alive",
        hint="let whoever owns the graph hold its inputs (the plan included), or capture again",
    )
