"""One host-to-device copy a step: all host integers packed into one pinned staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from anyattn.core.streams import EventRecorder

__all__ = ["Part", "UploadLayout", "Uploader"]

_ALIGN = 2  # int64 entries: keeps every packed vector 16-byte aligned
_SLOTS = 4  # staging buffers in flight before one is reused
_IN_PLACE = -1  # number of the region itself, where nothing has to be staged
_KEPT = 512  # views kept of one staging buffer

Part = tuple[int, torch.Tensor, torch.dtype]
"""`(byte offset, host vector, dtype that it is stored in)`."""


@dataclass
class _Staging:
    """A pinned buffer, the event of its last copy, and views of it by (offset, length, dtype)."""

    memory: torch.Tensor
    copied: Any
    views: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def view(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        key = (offset, length, dtype)
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= _KEPT:
                self.views.clear()
            found = self.memory[offset : offset + length * dtype.itemsize].view(dtype)
            self.views[key] = found
        return found


class UploadLayout:
    """Where the vectors of one batch after the other go: views are made once."""

    def __init__(self, region: torch.Tensor, fields: Sequence[tuple[str, int, int, torch.dtype]]) -> None:
        """`region` uint8, on the device. `fields`: attribute, byte offset, length, stored dtype of each."""
        self.region, self.nbytes = region, region.shape[0]
        self.read: Callable[[object], tuple[torch.Tensor, ...]] = attrgetter(*(name for name, *_ in fields))
        """`read(batch)`: its vectors."""
        self._places = [(at, length, dtype) for _, at, length, dtype in fields]
        self._placed: dict[int, tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]] = {}
        if region.is_cpu:
            self.placed(_IN_PLACE, region)

    def placed(self, number: int, memory: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Views of `memory` for the vectors, and for all that is copied. `number`: of the memory."""
        found = self._placed.get(number)
        if found is None or found[0] is not memory:
            vectors = [memory[at : at + n * dtype.itemsize].view(dtype) for at, n, dtype in self._places]
            found = self._placed[number] = memory, vectors, memory[: self.nbytes]
        return found[1], found[2]


class Uploader:
    """Moves host integers to one device.

    On a CPU they are copied where they belong. Elsewhere they are packed into a pinned buffer and copied
    asynchronously on the current stream; an event guards each buffer against reuse before its copy ended.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 17) -> None:
        """`capacity`: bytes that a staging buffer has at least."""
        self.device = device
        self._on_cpu, self._events = device.type == "cpu", EventRecorder(device)
        self._capacity = capacity
        self._ring: list[_Staging | None] = [None] * _SLOTS
        self._next = 0

    def send(self, region: torch.Tensor, parts: Sequence[Part]) -> None:
        """Store `parts` in `region` (uint8, on the device) in one copy. Bytes between them are undefined."""
        if self._on_cpu:
            for offset, vector, dtype in parts:
                region[offset : offset + vector.shape[0] * dtype.itemsize].view(dtype).copy_(vector)
            return
        staging = self._staging(region.shape[0])
        packed = [staging.view(offset, vector.shape[0], dtype) for offset, vector, dtype in parts]
        torch._foreach_copy_(packed, [vector for _, vector, _ in parts])
        region.copy_(staging.view(0, region.shape[0], torch.uint8), non_blocking=True)
        self._events.record(staging.copied)

    def send_again(self, layout: UploadLayout, vectors: tuple[torch.Tensor, ...]) -> None:
        """As `send`, for the vectors (on the host) of another batch of the same layout."""
        region = layout.region
        if self._on_cpu:
            torch._foreach_copy_(layout.placed(_IN_PLACE, region)[0], vectors)
            return
        number = self._next
        staging = self._staging(layout.nbytes)
        packed, whole = layout.placed(number, staging.memory)
        torch._foreach_copy_(packed, vectors)
        region.copy_(whole, non_blocking=True)
        self._events.record(staging.copied)

    def upload(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """int64 vectors on the device, in order; those that live there already are passed through."""
        if self._on_cpu:
            return list(vectors)
        host = [v for v in vectors if v.is_cpu]
        moved = iter(self._copy(host)) if host else iter(())
        return [next(moved) if v.is_cpu else v for v in vectors]

    def _copy(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, total = [], 0
        for v in vectors:
            starts.append(total)
            total += -(-v.shape[0] // _ALIGN) * _ALIGN
        packed = torch.empty(total, dtype=torch.int64, device=self.device)
        self.send(
            packed.view(torch.uint8), [(s * 8, v, torch.int64) for s, v in zip(starts, vectors, strict=True)]
        )
        return [packed[s : s + v.shape[0]] for s, v in zip(starts, vectors, strict=True)]

    def _staging(self, nbytes: int) -> _Staging:
        slot = self._ring[self._next]
        if slot is not None:
            slot.copied.synchronize()  # its last copy: long done, unless the host is _SLOTS steps ahead
        if slot is None or slot.memory.shape[0] < nbytes:
            with torch.inference_mode(False):  # written to inside of it and outside
                memory = torch.empty(max(nbytes, self._capacity), dtype=torch.uint8, pin_memory=True)
            slot = _Staging(memory, self._events.new_event())
            self._ring[self._next] = slot
        self._next = (self._next + 1) % _SLOTS
        return slot
