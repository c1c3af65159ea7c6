"""One host-to-device copy a step: all host integers packed into one pinned staging buffer."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from anyattn.core.capturing import is_capturing
from anyattn.core.metadata.staying import keep_until_read, sweep
from anyattn.core.streams import EventRecorder
from anyattn.errors import BatchError

__all__ = ["Part", "Place", "Pull", "UploadLayout", "Uploader"]

_ALIGN = 2  # int64 entries: keeps every vector of `upload` 16-byte aligned
_SLOTS = 4  # staging buffers in flight before one is reused
_KEPT = 512  # views kept of one staging buffer

Part = tuple[int, torch.Tensor, torch.dtype]
"""`(byte offset, host vector, dtype that it is stored in)`."""


class Place(NamedTuple):
    """Where a vector goes: byte offset in the region, entries, the dtype that it is stored in."""

    at: int
    length: int
    dtype: torch.dtype


Pull = Callable[["UploadLayout", torch.Tensor, int, int], bool]
"""`pull(layout, memory, address, stream)`: start a kernel on the stream that reads int64 vectors, one behind
the other, at `address` in pinned `memory` and stores them at the layout's places. False where there is none,
and nothing was done.
"""


@dataclass
class _Staging:
    """A pinned buffer that is filled from the front, the event of its last copy, and views of it."""

    memory: torch.Tensor
    copied: Any
    used: int = 0
    """Bytes handed out since it was entered."""
    stream: int | None = None
    """That all copies since then went to, the event being due; None: one copy, marked at once."""
    views: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size, self.address = self.memory.shape[0], self.memory.data_ptr()
        self.wide: Any = None
        """The memory as int64, as numpy has it; made when first asked for."""

    def as_wide(self) -> Any:
        """`wide`, made."""
        self.wide = self.memory[: self.size & -8].view(torch.int64).numpy()
        return self.wide

    def view(self, offset: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        key = (offset, length, dtype)
        found = self.views.get(key)
        if found is None:
            if len(self.views) >= _KEPT:
                self.views.clear()
            with torch.inference_mode(False):  # written to inside of it and outside
                found = self.memory[offset : offset + length * dtype.itemsize].view(dtype)
            self.views[key] = found
        return found


class UploadLayout:
    """Where the vectors of one batch after the other go."""

    def __init__(self, region: torch.Tensor, fields: Sequence[tuple[str, int, int, torch.dtype]]) -> None:
        """`region` uint8, on the device. `fields`: attribute, byte offset, length, stored dtype of each."""
        self.region, self.nbytes = region, region.shape[0]
        self.device_index = region.device.index
        self.read: Callable[[object], tuple[torch.Tensor, ...]] = attrgetter(*(name for name, *_ in fields))
        """`read(batch)`: its vectors."""
        self.places = [Place(at, length, dtype) for _, at, length, dtype in fields]
        self.pulled: Any = None
        """What `Pull` keeps of it."""
        self.wide, at = list[tuple[int, int]](), 0
        """Byte offset and size of each vector as int64, one behind the other."""
        for place in self.places:
            self.wide.append((at, 8 * place.length))
            at += 8 * place.length
        self.wide_bytes = at
        self.in_place = list[torch.Tensor]()
        """Views of a region that the host writes to itself."""
        if region.is_cpu:
            parts = ((p, region[p.at : p.at + p.length * p.dtype.itemsize]) for p in self.places)
            with torch.inference_mode(region.is_inference()):  # a view of another dtype is of its mode
                self.in_place = [part.view(place.dtype) for place, part in parts]

    def parts(self, vectors: tuple[torch.Tensor, ...]) -> list[Part]:
        """Of one copy. Raises `BatchError` for a vector of another length."""
        for vector, place in zip(vectors, self.places, strict=True):
            if vector.shape[0] != place.length:
                raise BatchError(
                    "a vector of the batch isn't as long as those before",
                    asked=vector.shape[0],
                    allowed=place.length,
                    hint="build batches with ForwardBatch.decode, extend, mixed or verify",
                )
        return [(place.at, vector, place.dtype) for vector, place in zip(vectors, self.places, strict=True)]


class Uploader:
    """Moves host integers to one device.

    On a CPU they are copied where they belong. Elsewhere they are packed into a pinned buffer and copied
    asynchronously on the current stream; an event guards each buffer against reuse before its copies ended,
    and when the uploader is gone.
    """

    def __init__(
        self, device: torch.device, capacity: int = 1 << 17, events: EventRecorder | None = None
    ) -> None:
        """`capacity`: bytes that a staging buffer has at least. `events`: of a stand-in."""
        self.device = device
        self.pull: Pull | None = None
        """Where there is one, repeated uploads are read by the device, which costs the host less than a copy:
        a copy goes to another engine, that the kernels behind it are made to wait for.
        """
        self._on_cpu, self._events = device.type == "cpu", events or EventRecorder(device)
        self._capacity = capacity
        self._ring: list[_Staging | None] = [None] * _SLOTS
        self._next = 0
        self._lock = threading.Lock()
        self._unmarked: list[_Staging] = []
        """Never written to again: when they were to be marked, their stream was being captured."""
        if not self._on_cpu:
            left = weakref.finalize(self, _leave, self._ring, self._unmarked, self._events)
            left.atexit = False  # nothing is handed out again then

    def send(self, region: torch.Tensor, parts: Sequence[Part]) -> None:
        """Store `parts` in `region` (uint8, on the device) in one copy. Bytes between them are undefined."""
        if self._on_cpu:
            for offset, vector, dtype in parts:
                region[offset : offset + vector.shape[0] * dtype.itemsize].view(dtype).copy_(vector)
            return
        nbytes = region.shape[0]
        with self._lock:
            staging, first = self._staging(nbytes)
            packed = [staging.view(first + at, vector.shape[0], dtype) for at, vector, dtype in parts]
            torch._foreach_copy_(packed, [vector for _, vector, _ in parts])
            region.copy_(staging.view(first, nbytes, torch.uint8), non_blocking=True)
            if staging.stream is None:
                self._events.record(staging.copied)

    def send_again(self, layout: UploadLayout, vectors: tuple[torch.Tensor, ...], wide: Any = None) -> None:
        """As `send`, for the vectors (on the host) of another batch of the same layout.

        `wide`: the same vectors as one of numpy, int64, one behind the other.
        """
        if self._on_cpu:
            torch._foreach_copy_(layout.in_place, vectors)
            return
        if wide is not None:
            pulled = self.put(layout, wide)
        else:
            pulled = self.pull is not None and self._pulled(layout, vectors, self.pull)
        if not pulled:
            self.send(layout.region, layout.parts(vectors))

    def put(self, layout: UploadLayout, wide: Any) -> bool:
        """`send_again` where the device reads `wide` by itself; False: it doesn't, and nothing was done."""
        nbytes, pull = layout.wide_bytes, self.pull
        if pull is None or self._on_cpu:
            return False
        with self._lock:
            staging, stream = self._ring[self._next], self._events.shared()
            if stream is None:
                return False
            if staging is not None and staging.stream == stream and staging.used + nbytes <= staging.size:
                first = staging.used
                staging.used = first + (nbytes + 15 & -16)  # as `_staging`, without its calls
            else:
                staging, first = self._staging(nbytes)
            whole = staging.wide
            if whole is None:
                whole = staging.as_wide()
            # A few hundred integers: torch's copies cost several times as much.
            whole[first >> 3 : (first >> 3) + len(wide)] = wide
            return pull(layout, staging.memory, staging.address + first, stream)

    def _pulled(self, layout: UploadLayout, vectors: tuple[torch.Tensor, ...], pull: Pull) -> bool:
        """The device reads the vectors; False where they, or the streams here, aren't plain."""
        parts = []
        for vector, (at, nbytes) in zip(vectors, layout.wide, strict=True):
            if vector.dtype is not torch.int64 or vector.nbytes != nbytes or not vector.is_contiguous():
                return False
            parts.append((at, vector.data_ptr(), nbytes))
        with self._lock:
            staging, first = self._staging(layout.wide_bytes)
            if staging.stream is None:
                return False
            begin = staging.address + first
            for at, source, nbytes in parts:
                ctypes.memmove(begin + at, source, nbytes)  # a third of what torch's copies of so little cost
            return pull(layout, staging.memory, begin, staging.stream)

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

    def _staging(self, nbytes: int) -> tuple[_Staging, int]:
        """Room for one copy on the current stream, and where it begins.

        Copies on one stream share a buffer, and one event behind the last of them.
        """
        stream, room = self._events.shared(), -(-nbytes // 16) * 16
        slot = self._ring[self._next]
        if slot is not None and slot.stream == stream is not None:
            first = slot.used
            if first + nbytes <= slot.size:
                slot.used += room
                return slot, first
        slot = self._entered(nbytes)
        slot.used, slot.stream = room, stream
        return slot, 0

    def _entered(self, nbytes: int) -> _Staging:
        """The next buffer of the ring, whose copies have ended, behind the one that is full."""
        full = self._ring[self._next]
        if full is not None and not self._marked(full):
            self._unmarked.append(full)
            self._ring[self._next] = None
        self._next = (self._next + 1) % _SLOTS
        slot = self._ring[self._next]
        if slot is not None:
            slot.copied.synchronize()  # long done, unless the host is a ring of copies ahead
        if slot is None or slot.size < nbytes:
            if not is_capturing(self.device):
                sweep()
            with torch.inference_mode(False):  # written to inside of it and outside
                memory = torch.empty(
                    max(nbytes, self._capacity), dtype=torch.uint8, device="cpu", pin_memory=True
                )
            slot = self._ring[self._next] = _Staging(memory, self._events.new_event())
        return slot

    def _marked(self, full: _Staging) -> bool:
        """The event is behind the copies of a buffer that is left."""
        return full.stream is None or self._events.record_on(full.stream, full.copied)


def _leave(ring: list[_Staging | None], unmarked: list[_Staging], events: EventRecorder) -> None:
    """An uploader is gone, and the device may not have read all of its buffers."""
    for each in (*ring, *unmarked):
        if each is not None:
            mark = None if each.stream is None else partial(events.record_on, each.stream, each.copied)
            keep_until_read(each.memory, each.copied, mark)
