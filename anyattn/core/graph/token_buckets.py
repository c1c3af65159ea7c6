"""Token buckets: how many rows a captured prefill has. Requests don't matter: attention runs eagerly."""

from __future__ import annotations

from collections.abc import Iterable

from anyattn.core.graph.buckets import Buckets
from anyattn.errors import GraphError

__all__ = ["TokenBuckets"]

_FIRST, _FINE = 16, 256
_PER_OCTAVE = 4


class TokenBuckets(Buckets):
    """Numbers of query tokens that segments are captured for; a step runs in the smallest that holds it."""

    def __init__(self, sizes: Iterable[int]) -> None:
        """Raises `GraphError` without a size, or for one below 1."""
        given = tuple(sizes)
        if not given or min(given) < 1:
            raise GraphError(
                "buckets of tokens",
                asked=given,
                allowed="one size or more, each >= 1",
                hint="TokenBuckets.up_to(limits.max_tokens)",
            )
        super().__init__(given)

    @staticmethod
    def up_to(largest: int) -> TokenBuckets:
        """Powers of two from 16 to 256, four sizes an octave beyond, and `largest` itself.

        A step then computes at most twice its rows up to 256 of them, 1.25 times beyond.
        """
        sizes, size = [largest], _FIRST
        while size < largest:
            sizes.append(size)
            octave = 1 << (size.bit_length() - 1)
            size += octave if size < _FINE else octave // _PER_OCTAVE
        return TokenBuckets(sizes)

    def fit(self, num_tokens: int) -> int:
        """The smallest size that holds them. Raises `GraphError` beyond the largest."""
        if num_tokens > self.largest:
            raise GraphError(
                "more tokens than the largest captured bucket",
                asked=num_tokens,
                allowed=f"<= {self.largest} (buckets {', '.join(map(str, self.sizes))})",
                hint="capture a larger bucket, prefill in chunks, or run this step eagerly",
            )
        return super().fit(num_tokens)
