"""Which item a worker takes next: those that need the same compiled kernels stay in one process.

A backend that compiles for each shape (FlexAttention, CuTe DSL, Triton) spends more on compiling than on
running. Items dealt in turns would make every process compile every kernel.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from anyattn.testing.plan import Item

__all__ = ["Deck", "kernel_of"]


def kernel_of(item: Item) -> tuple[object, ...]:
    """What kernels are commonly compiled for; lengths, slots and data are no part of it."""
    case = item.case
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.v_head_dim)
    stored = (case.dtype, case.kv_dtype, case.page_size, case.layout)
    return (*heads, *stored, case.mode == "decode", case.logit_cap is None)


class Deck:
    """Items of a run by `kernel_of`, for several threads."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._lock = threading.Lock()
        self._piles: dict[tuple[object, ...], deque[tuple[int, Item]]] = {}
        self._owned: set[tuple[object, ...]] = set()
        for index, item in enumerate(items):
            self._piles.setdefault(kernel_of(item), deque()).append((index, item))

    def take(self, last: Item | None) -> tuple[int, Item] | None:
        """The next item and its number, None when all are taken.

        `last`: what the caller had before. Its pile goes on; else the first that nobody began; else the
        one with most left is shared, so that no worker idles while another has a long pile.
        """
        with self._lock:
            if not self._piles:
                return None
            key = kernel_of(last) if last is not None else None
            if key not in self._piles:
                fresh = next((k for k in self._piles if k not in self._owned), None)
                key = fresh or max(self._piles, key=lambda k: len(self._piles[k]))
            assert key is not None
            self._owned.add(key)
            taken = self._piles[key].popleft()
            if not self._piles[key]:
                del self._piles[key]
            return taken
