"""One host-to-device copy a step: all host integers packed into one pinned staging buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyattn.core.streams import EventRecorder

__all__ = ["Part", "Uploader"]

_ALIGN = 2  # int64 entries: keeps every packed vector 16-byte aligned
_SLOTS = 4  # staging buffers in flight before one is reused
_KEPT = 512  # views kept of one staging buffer

Part = tuple[int, torch.Tensor, torch.dtype]
"""`(byte offset, host vector, dtype that it is stored in)`."""


@dataclass
class _Staging:
    """A pinned buffer, the event of its last copy, views of it by (offset, length, dtype), and by layout."""

    memory: torch.Tensor
    copied: Any
    views: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    layouts: dict[int, tuple[object, list[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def view(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        key = (offset, length, dtype)
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= _KEPT:
                self.views.clear()
            found = self.memory[offset : offset + length * dtype.itemsize].view(dtype)
            self.views[key] = found
        return found


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

    def send(self, region: torch.Tensor, parts: Sequence[Part], layout: object = None) -> None:
        """Store `parts` in `region` (uint8, on the device) in one copy. Bytes between them are undefined.

        `layout`: the same object for parts of the same offsets, lengths and types, to find them faster.
        """
        if self._on_cpu:
            for offset, vector, dtype in parts:
                region[offset : offset + vector.shape[0] * dtype.itemsize].view(dtype).copy_(vector)
            return
        staging = self._staging(region.shape[0])
        known = None if layout is None else staging.layouts.get(id(layout))
        if known is None or known[0] is not layout:
            packed = [staging.view(offset, vector.shape[0], dtype) for offset, vector, dtype in parts]
            known = (layout, packed, staging.view(0, region.shape[0], torch.uint8))
            if layout is not None:
                staging.layouts[id(layout)] = known
        torch._foreach_copy_(known[1], [vector for _, vector, _ in parts])
        region.copy_(known[2], non_blocking=True)
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
            memory = torch.empty(max(nbytes, self._capacity), dtype=torch.uint8, pin_memory=True)
            slot = _Staging(memory, self._events.new_event())
            self._ring[self._next] = slot
        self._next = (self._next + 1) % _SLOTS
        return slot
