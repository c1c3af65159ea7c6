"""Which graphs there are: buckets of requests, and the key that tells captured graphs apart."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from anyattn.core.batch import ForwardMode
from anyattn.core.strategy import Strategy
from anyattn.errors import GraphError

__all__ = ["Buckets", "GraphKey"]

_FINE, _STEP, _COARSE = 8, 8, 32  # every power of two to 8, then steps of 8 to 64, then of 32
_DENSE_UP_TO = 64


@dataclass(frozen=True)
class GraphKey:
    """What is fixed inside one graph. All that is chosen a step is chosen before, and names a graph.

    Attributes:
        mask: `none`, or the form of a `VerifyMask`. route: which of several backends runs it, by name.
    """

    mode: ForwardMode
    num_requests: int
    tokens_per_request: int = 1
    strategy: Strategy = Strategy.PAGED
    mask: str = "none"
    route: str = ""

    @property
    def num_tokens(self) -> int:
        """Query tokens, padding included."""
        return self.num_requests * self.tokens_per_request

    def __str__(self) -> str:
        mask = "" if self.mask == "none" else f", {self.mask}"
        route = f", {self.route}" if self.route else ""
        return f"{self.mode.value} of {self.num_requests} x {self.tokens_per_request}{mask}{route}"


class Buckets:
    """Sizes that a graph is captured for, in rising order; a step runs in the smallest that holds it."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """Raises `GraphError` without a size, or for one below 1."""
        self.sizes = tuple(sorted(set(sizes)))
        if not self.sizes or self.sizes[0] < 1:
            raise GraphError(
                "buckets of requests",
                asked=self.sizes,
                allowed="one size or more, each >= 1",
                hint="Buckets.up_to(limits.max_requests)",
            )

    @staticmethod
    def up_to(largest: int) -> Buckets:
        """1, 2, 4, 8, steps of 8 to 64, steps of 32 beyond, and `largest` itself."""
        fine = [1 << i for i in range(_FINE.bit_length()) if 1 << i < largest]
        dense = range(2 * _STEP, min(largest, _DENSE_UP_TO + 1), _STEP)
        coarse = range(_DENSE_UP_TO + _COARSE, largest, _COARSE)
        return Buckets([*fine, *dense, *coarse, largest])

    @property
    def largest(self) -> int:
        """The largest size."""
        return self.sizes[-1]

    def fit(self, num_requests: int) -> int:
        """The smallest size that holds them. Raises `GraphError` beyond the largest."""
        if num_requests > self.sizes[-1]:
            raise GraphError(
                "more requests than the largest captured bucket",
                asked=num_requests,
                allowed=f"<= {self.largest} (buckets {', '.join(map(str, self.sizes))})",
                hint="capture a larger bucket, split the batch, or run this step eagerly",
            )
        return self.sizes[bisect_left(self.sizes, num_requests)]
