"""Rows and slots that a step names, checked on the host: rows of the request table; slots inside the pool,
outside the sink page, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyattn.errors import BatchError

__all__ = ["RowCheck", "SlotCheck"]

_KEPT = 256  # lengths of lists that something is kept for


class RowCheck:
    """Checks lists of rows of one request table, by a read at each: no search for the extremes."""

    def __init__(self, rows: int) -> None:
        """Rows are `0 .. rows - 1`."""
        self._rows = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        self._read: dict[int, torch.Tensor] = {}

    def inside(self, rows: torch.Tensor) -> bool:
        """`rows` int64 on the CPU: all of them are rows of the table."""
        count = rows.shape[0]
        read = self._read.get(count)
        if read is None:
            if len(self._read) >= _KEPT:
                self._read.clear()
            with torch.inference_mode(False):  # written to inside of it and outside
                read = self._read[count] = torch.empty(count, dtype=torch.uint8, device="cpu")
        try:
            torch.index_select(self._rows, 0, rows, out=read)
        except IndexError:
            return False
        return True


class SlotCheck:
    """Checks lists of slots of one pool. Each token notes its number at its slot and looks whether it is
    still there: no sort, no search for the extremes. Where that fails, the list is read again for the reason.
    """

    def __init__(self, page_size: int, total_slots: int) -> None:
        """The first `page_size` slots are the sink. Notes take 4 bytes a slot, from the first check on."""
        self._first, self._total = page_size, total_slots
        self._notes = self._order = torch.empty(0, dtype=torch.int32, device="cpu")
        self._plain = not _has_numpy()
        self._views: Any = None
        self._clean = bytes(4 * page_size)
        self._orders: dict[int, Any] = {}

    def check(self, name: str, slots: torch.Tensor) -> None:
        """`slots` int64 on the CPU.

        Raises:
            BatchError: a slot of page 0 or beyond the pool, or one that is named twice.
        """
        count = slots.shape[0]
        if not count:
            return
        noted = self._by_torch(slots, count) if self._plain else self._by_numpy(slots, count)
        if not noted:
            self._notes[: self._first] = 0  # a list that is refused may have left notes there
            self._refuse(name, slots)

    def noting(self, count: int) -> Callable[[Any], bool]:
        """For lists of `count` slots, numpy int64 and inside the pool: whether `check` would refuse none of
        them. Where it says False, `check` is to follow.
        """
        order, whole = self._orders.get(count) or self._numbers(count)
        notes, _, sink = self._views
        clean = self._clean

        def noted(at: Any) -> bool:
            notes[at] = order
            return bool(notes[at].tobytes() == whole and sink.tobytes() == clean)

        return noted

    def _by_numpy(self, slots: torch.Tensor, count: int) -> bool:
        """For a list of a few hundred, the same operations of torch take three times as long."""
        order, whole = self._orders.get(count) or self._numbers(count)
        notes, both, sink = self._views
        at = slots.numpy()
        try:
            notes[at] = order
        except IndexError:  # beyond the pool
            return False
        # A negative slot counts from the end: of other notes here than there, and those stay zero.
        return bool(both[at].tobytes() == whole and sink.tobytes() == self._clean)

    @property
    def by_numpy(self) -> bool:
        """There is numpy."""
        return not self._plain

    def _by_torch(self, slots: torch.Tensor, count: int) -> bool:
        order, _ = self._orders.get(count) or self._numbers(count)
        notes, _, sink = self._views
        try:
            notes.index_copy_(0, slots, order)
        except IndexError:  # beyond the pool, or negative
            return False
        return bool(torch.equal(notes.index_select(0, slots), order) and not sink.any())

    def _numbers(self, count: int) -> Any:
        """The numbers of as many tokens, from 1 on: zero is nobody's."""
        plain = self._plain
        if not self._notes.shape[0]:
            # The second half is never written to: it costs addresses, no memory.
            with torch.inference_mode(False):  # written to inside of it and outside
                self._notes = torch.zeros(2 * self._total, dtype=torch.int32, device="cpu")
            notes = self._notes if plain else self._notes.numpy()
            self._views = notes[: self._total], notes, notes[: self._first]
        if self._order.shape[0] < count:
            self._order = torch.arange(1, 2 * count + 1, dtype=torch.int32, device="cpu")
            self._orders.clear()
        if len(self._orders) >= _KEPT:
            self._orders.clear()
        order = self._order[:count]
        made = (order, b"") if plain else (order.numpy(), order.numpy().tobytes())
        self._orders[count] = made
        return made

    def _refuse(self, name: str, slots: torch.Tensor) -> None:
        ordered = slots.sort().values
        lowest, highest = int(ordered[0]), int(ordered[-1])
        allowed = f"{self._first}..{self._total - 1}"
        if lowest < self._first:
            raise BatchError(
                f"{name} names a slot in page 0, the sink that belongs to nobody",
                asked=lowest,
                allowed=allowed,
                hint="hand out pages from 1 on; only padded rows may name slot 0",
            )
        if highest >= self._total:
            raise BatchError(
                f"{name} beyond the pool",
                asked=highest,
                allowed=allowed,
                hint="create the pool with more slots",
            )
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if not twice.numel():
            return  # another thread's notes were there: the list itself is right
        raise BatchError(
            f"{name} writes the same slot twice",
            asked=int(twice[0]),
            allowed="one token a slot in a step",
            hint="free a slot before it is handed out again",
        )


def _has_numpy() -> bool:
    """torch runs without it, too."""
    try:
        torch.empty(0, device="cpu").numpy()
    except RuntimeError:
        return False
    return True
