"""FlashInfer's planned wrappers, one plan each: lent to a plan, and taken back when that plan is gone.

A wrapper holds one plan's work lists (8 MiB on the device, 8 MiB pinned); several plans of a backend may be
alive at once, so each needs wrappers of its own. Planning writes into pinned memory and copies from it
asynchronously: a wrapper isn't planned again before its last copy is through.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Lender", "Slot"]


@dataclass(eq=False)
class Slot:
    """A wrapper, and the event behind the copies of its last plan (None on a CPU)."""

    wrapper: Any
    copied: torch.cuda.Event | None

    @staticmethod
    def of(wrapper: Any, device: torch.device) -> Slot:
        """A wrapper that nothing was planned with."""
        if device.type == "cpu":
            return Slot(wrapper, None)
        return Slot(wrapper, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def plan(self, call: Callable[[Any], None]) -> Any:
        """Plan with `call(wrapper)`; waits for the copies of the plan before. Returns the wrapper."""
        if self.copied is not None:
            self.copied.synchronize()
        call(self.wrapper)
        if self.copied is not None:
            self.copied.record()
        return self.wrapper


class Lender:
    """Wrappers of one kind; the one that was given back longest ago is lent first."""

    def __init__(self, make: Callable[[], Any], device: torch.device) -> None:
        self._make, self._device = make, device
        self._free: deque[Slot] = deque()

    def plan(self, owner: object, call: Callable[[Any], None]) -> Any:
        """A wrapper planned by `call(wrapper)`, which is `owner`'s while that is alive."""
        if self._free:
            slot = self._free.popleft()
        else:
            with torch.inference_mode(False):  # some plans write to tensors of the wrapper's own
                slot = Slot.of(self._make(), self._device)
        weakref.finalize(owner, self._free.append, slot).atexit = False
        return slot.plan(call)
