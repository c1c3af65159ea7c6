"""Slots that a step writes, checked on the host: inside the pool, outside the sink page, each once."""

from __future__ import annotations

import torch

from anyattn.errors import BatchError

__all__ = ["SlotCheck"]

_KEPT = 256  # views kept of the order


class SlotCheck:
    """Checks lists of slots of one pool. Each token notes its number at its slot and looks whether it is
    still there: no sort, no search for the extremes. Where that fails, the list is read again for the reason.
    """

    def __init__(self, page_size: int, total_slots: int) -> None:
        """The first `page_size` slots are the sink. Notes take 4 bytes a slot, from the first check on."""
        self._first, self._total = page_size, total_slots
        self._notes = torch.empty(0, dtype=torch.int32)
        self._sink = self._clean = self._order = self._notes
        self._orders: dict[int, torch.Tensor] = {}

    def check(self, name: str, slots: torch.Tensor) -> None:
        """`slots` int64 on the CPU.

        Raises:
            BatchError: a slot of page 0 or beyond the pool, or one that is named twice.
        """
        count = slots.shape[0]
        if count == 0:
            return
        order = self._orders.get(count)
        if order is None:
            order = self._numbers(count)
        if not self._noted(slots, order):
            self._sink.copy_(self._clean)  # a list that is refused may have left notes there
            self._refuse(name, slots)

    def _noted(self, slots: torch.Tensor, order: torch.Tensor) -> bool:
        try:
            self._notes.index_copy_(0, slots, order)
        except IndexError:  # a slot beyond the pool, or a negative one
            return False
        clean = torch.equal(self._sink, self._clean)
        return clean and torch.equal(self._notes.index_select(0, slots), order)

    def _numbers(self, count: int) -> torch.Tensor:
        if not self._notes.shape[0]:
            self._notes = torch.zeros(self._total, dtype=torch.int32)
            self._sink = self._notes[: self._first].fill_(-1)
            self._clean = self._sink.clone()
        if self._order.shape[0] < count:
            self._order = torch.arange(2 * count, dtype=torch.int32)
            self._orders.clear()
        if len(self._orders) >= _KEPT:
            self._orders.clear()
        order = self._orders[count] = self._order[:count]
        return order

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
        raise BatchError(
            f"{name} writes the same slot twice",
            asked=int(ordered[1:][ordered[1:] == ordered[:-1]][0]),
            allowed="one token a slot in a step",
            hint="free a slot before it is handed out again",
        )
