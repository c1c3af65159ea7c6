"""Pinned memory that FlashInfer's planners write to, by turns: a step needn't wait for the copy of the last.

`plan` writes its work lists into pinned memory and starts a copy to the device, behind everything that the
stream has been given so far. Planning into the same memory again before that copy ran would change it, and
waiting for it would wait for the step before.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.streams import EventRecorder

__all__ = ["Staging"]

_TURNS = 4
"""Plans in flight before memory is used again."""
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
        self._rings: dict[int, deque[_Slot]] = {}
        self._own: weakref.WeakKeyDictionary[Any, _Slot] = weakref.WeakKeyDictionary()

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
        return torch.empty(pinned.shape, dtype=pinned.dtype, pin_memory=pinned.is_pinned())
