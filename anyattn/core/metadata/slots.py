"""Slots that a step writes, checked on the host: inside the pool, outside the sink page, each once."""

from __future__ import annotations

import torch

from anyattn.errors import BatchError

__all__ = ["SlotCheck"]

_KEPT = 256  # views kept of the order


class SlotCheck:
    """Checks lists of slots of one pool. Finding a repeated one takes a note per slot, not a sort."""

    def __init__(self, page_size: int, total_slots: int) -> None:
        """`page_size` slots at the beginning are the sink."""
        self._first, self._total = page_size, total_slots
        self._notes: torch.Tensor | None = None
        self._order = torch.empty(0, dtype=torch.int32)
        self._orders: dict[int, torch.Tensor] = {}

    def check(self, name: str, slots: torch.Tensor) -> None:
        """`slots` int64 on the CPU.

        Raises:
            BatchError: a slot of page 0 or beyond the pool, or one that is named twice.
        """
        count = slots.shape[0]
        if count == 0:
            return
        lowest, highest = (int(x) for x in torch.aminmax(slots))
        if lowest < self._first or highest >= self._total:
            self._refuse(name, lowest, highest)
        if count > 1 and self._repeats(slots, count):
            ordered = slots.sort().values
            raise BatchError(
                f"{name} writes the same slot twice",
                asked=int(ordered[1:][ordered[1:] == ordered[:-1]][0]),
                allowed="one token a slot in a step",
                hint="free a slot before it is handed out again",
            )

    def _repeats(self, slots: torch.Tensor, count: int) -> bool:
        """Each token notes its number at its slot, and looks whether it is still there."""
        if self._notes is None:
            self._notes = torch.zeros(self._total, dtype=torch.int32)
        order = self._orders.get(count)
        if order is None:
            if self._order.shape[0] < count:
                self._order = torch.arange(2 * count, dtype=torch.int32)
                self._orders.clear()
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            order = self._orders[count] = self._order[:count]
        self._notes.index_copy_(0, slots, order)
        return not torch.equal(self._notes.index_select(0, slots), order)

    def _refuse(self, name: str, lowest: int, highest: int) -> None:
        allowed = f"{self._first}..{self._total - 1}"
        if lowest < self._first:
            raise BatchError(
                f"{name} names a slot in page 0, the sink that belongs to nobody",
                asked=lowest,
                allowed=allowed,
                hint="hand out pages from 1 on; only padded rows may name slot 0",
            )
        raise BatchError(
            f"{name} beyond the pool", asked=highest, allowed=allowed, hint="create the pool with more slots"
        )
