"""One host-to-device copy a step: all host integers packed into one pinned staging buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Uploader"]

_ALIGN = 2  # int64 entries: keeps every packed vector 16-byte aligned
_SLOTS = 4  # staging buffers in flight before one is reused


class Uploader:
    """Moves int64 host vectors to one device.

    On a CPU the vectors are used as they are. Elsewhere they are packed into a pinned buffer and copied
    asynchronously on the current stream; an event guards each buffer against reuse before its copy ended.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 14) -> None:
        self.device = device
        self._capacity = capacity
        self._ring: list[tuple[torch.Tensor, torch.cuda.Event] | None] = [None] * _SLOTS
        self._next = 0

    def upload(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """int64 vectors on the device, in order; those that live there already are passed through."""
        if self.device.type == "cpu":
            return list(vectors)
        host = [v for v in vectors if v.device.type == "cpu"]
        moved = iter(self._copy(host)) if host else iter(())
        return [next(moved) if v.device.type == "cpu" else v for v in vectors]

    def _copy(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts, total = [], 0
        for v in vectors:
            starts.append(total)
            total += -(-v.shape[0] // _ALIGN) * _ALIGN
        staging, event = self._staging(total)
        for start, v in zip(starts, vectors, strict=True):
            staging[start : start + v.shape[0]] = v
        packed = staging[:total].to(self.device, non_blocking=True)
        event.record()
        return [packed[s : s + v.shape[0]] for s, v in zip(starts, vectors, strict=True)]

    def _staging(self, total: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        slot = self._ring[self._next]
        if slot is not None:
            slot[1].synchronize()  # its last copy: long done, unless the host is _SLOTS steps ahead
        if slot is None or slot[0].shape[0] < total:
            size = max(total, self._capacity)
            slot = (torch.empty(size, dtype=torch.int64, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._ring[self._next] = slot
        self._next = (self._next + 1) % _SLOTS
        return slot
