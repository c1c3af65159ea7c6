"""Pinned memory that FlashInfer's planners write to, by turns: a step needn't wait for the copy of the last.

`plan` writes its work lists into pinned memory and starts a copy to the device, behind everything that the
stream has been given so far. Planning into the same memory again before that copy ran would change it, and
waiting for it would wait for the step before.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.streams import EventRecorder

__all__ = ["PIECE", "Pieces", "Staging"]

_TURNS = 4
"""Plans in flight before memory is used again."""
PIECE = 128 << 10
"""Bytes of a piece. A decode step writes 20 bytes a request or so, but for fa3, which lists every head."""
_PIECES = 8
_PINNED = "_pin_memory_int_workspace_buffer"
"""Where wrappers of 0.6 and 0.7 keep theirs (decode.py, prefill.py); `fast_decode_plan` reads it, too."""


@dataclass(eq=False)
class _Slot:
    """`memory`: None = what the wrapper made for itself. `copied`: the event behind its last copy."""

    memory: torch.Tensor | None
    copied: Any


class Staging:
    """Plans wrappers, each time from other pinned memory.

    A wrapper that doesn't show its memory keeps it, and is waited for.
    """

    def __init__(self, events: EventRecorder | None) -> None:
        """`events`: of the device; None where copies have ended when they return (a CPU)."""
        self._events = events
        self.pieces = None if events is None else Pieces(events)
        """For native plans of a step that is known to fit."""
        self._rings: dict[int, deque[_Slot]] = {}
        self._own: weakref.WeakKeyDictionary[Any, _Slot] = weakref.WeakKeyDictionary()

    def stream(self) -> int | None:
        """The current stream, by which copies are ordered; None where it can't be told from others."""
        return 0 if self._events is None else self._events.shared()

    def plan(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        """`wrapper.plan(*args, **kwargs)`."""
        self.staged(wrapper, wrapper.plan, *args, **kwargs)

    def staged(self, wrapper: Any, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`call(*args, **kwargs)`, which plans `wrapper` in the memory that it has then."""
        events = self._events
        if events is None:
            call(*args, **kwargs)
            return
        slot = self._slot(wrapper, events)
        slot.copied.synchronize()
        if slot.memory is not None:
            setattr(wrapper, _PINNED, slot.memory)
        try:
            call(*args, **kwargs)
        finally:
            events.record(slot.copied)

    def _slot(self, wrapper: Any, events: EventRecorder) -> _Slot:
        pinned = getattr(wrapper, _PINNED, None)
        if not isinstance(pinned, torch.Tensor) or pinned.dtype is not torch.uint8:
            own = self._own.get(wrapper)
            if own is None:
                own = self._own[wrapper] = _Slot(None, events.new_event())
            return own
        ring = self._rings.setdefault(pinned.shape[0], deque())
        if len(ring) < _TURNS:
            ring.append(_Slot(self._fresh(pinned, ring), events.new_event()))
        else:
            ring.rotate(-1)
        return ring[-1]

    @staticmethod
    def _fresh(pinned: torch.Tensor, ring: deque[_Slot]) -> torch.Tensor:
        """The wrapper's own, unless the ring has it already."""
        if all(slot.memory is not pinned for slot in ring):
            return pinned
        return torch.empty(pinned.shape, dtype=pinned.dtype, device="cpu", pin_memory=pinned.is_pinned())


@dataclass(eq=False)
class _Block:
    """`stream`: that the copies since it was entered went to, the event being due when it is left."""

    pieces: list[torch.Tensor]
    copied: Any
    used: int = 0
    stream: int | None = None


class Pieces:
    """Small pieces of pinned memory for one native plan each: one event stands behind many of them.

    Marking each copy with an event and asking for it later costs a step as much as its offsets do.
    """

    def __init__(self, events: EventRecorder) -> None:
        """`events`: of the device."""
        self._events = events
        self._ring: list[_Block | None] = [None] * _TURNS
        self._next = 0
        self.lock = threading.Lock()
        """Held from `take` until the plan has started its copy."""
        self._unmarked: list[_Block] = []
        """Never written to again: when they were to be marked, their stream was being captured."""

    def take(self) -> torch.Tensor | None:
        """uint8 `[PIECE]` that no copy reads any more; None where streams can't be told apart."""
        stream, block = self._events.shared(), self._ring[self._next]
        if stream is None:
            return None
        if block is None or block.stream != stream or block.used == _PIECES:
            block = self._entered()
            block.used, block.stream = 0, stream
        block.used += 1
        return block.pieces[block.used - 1]

    def _entered(self) -> _Block:
        """The next block of the ring, whose copies have ended, behind the one that is left."""
        left = self._ring[self._next]
        if left is not None and left.stream is not None:
            if not self._events.record_on(left.stream, left.copied):
                self._unmarked.append(left)
                self._ring[self._next] = None
            left.stream = None
        self._next = (self._next + 1) % _TURNS
        block = self._ring[self._next]
        if block is None:
            with torch.inference_mode(False):
                pinned = torch.cuda.is_available()
                memory = torch.empty(PIECE * _PIECES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            parts = [memory[i * PIECE :][:PIECE] for i in range(_PIECES)]
            block = _Block(parts, self._events.new_event())
            self._ring[self._next] = block
        else:
            block.copied.synchronize()  # long done, unless the host is a ring of plans ahead
        return block
