"""Where a packed page keeps each element, learnt by writing numbers through the format's own writer.

For tests and for reading KV back. What a format looks like inside stays its library's business: whatever a
release does, as long as it only moves elements about, this finds them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyattn.errors import PoolError

__all__ = ["ElementOrder", "Put", "learn"]

Put = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Writes `k [P, H, D]`, `v [P, H, Dv]` to a whole page; returns that page of the K and the V storage."""

_BASE = 128
"""Digits are below this, with a sign: exact in every dtype of 16 bits or more."""


class ElementOrder:
    """Rows of pages `[pages, ...]` that hold `P * H * D` elements each, in any order.

    Index it with the storage and `(page [n], row [n])`: elements `[n, H, D]`.
    """

    def __init__(self, numbers: torch.Tensor, shape: tuple[int, int, int]) -> None:
        """`numbers`: of the element at each place of a page; `shape`: (P, H, D).

        Raises:
            PoolError: some element is in two places, or in none.
        """
        flat = numbers.reshape(-1)
        if not torch.equal(flat.sort().values, torch.arange(flat.numel())):
            raise PoolError(
                "a packed format whose writer does more than move elements about",
                asked="reading it back",
                allowed="a permutation of a page's elements",
                hint="give the format a reader of its own (PackedFormat.read)",
            )
        places = torch.empty_like(flat)
        places[flat] = torch.arange(flat.numel())
        self._at = torch.unravel_index(places.view(shape), tuple(numbers.shape))

    def _index(self, page: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (page[:, None, None], *(axis.to(page.device)[row] for axis in self._at))

    def get(self, storage: torch.Tensor, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Elements `[n, H, D]` of these rows."""
        return storage[self._index(page, row)]

    def put(self, storage: torch.Tensor, page: torch.Tensor, row: torch.Tensor, x: torch.Tensor) -> None:
        """Set them, bit for bit: for tests, which also plant what no writer would."""
        storage[self._index(page, row)] = x


def learn(
    put: Put, page: int, heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> tuple[ElementOrder, ElementOrder]:
    """Order of K and of V in a page of `page` rows, from what `put` does with numbers.

    Raises:
        PoolError: what was written doesn't come out again, each element once.
    """
    shapes = (page, heads, dim), (page, heads, v_dim)
    numbers = [torch.arange(a * b * c).view(a, b, c) for a, b, c in shapes]
    found: list[torch.Tensor] = [torch.zeros(())] * 2
    power = 1
    while power < max(n.numel() for n in numbers):
        digits = [n // power % _BASE + 1 for n in numbers]
        read = put(digits[0].to(dtype), -digits[1].to(dtype))  # the sign tells K from V
        for i, (got, sign) in enumerate(zip(read, (1, -1), strict=True)):
            digit = (got.double() * sign).long() - 1
            found[i] = found[i] + digit * power
        power *= _BASE
    return ElementOrder(found[0].long(), shapes[0]), ElementOrder(found[1].long(), shapes[1])
