"""Who is faster: over the buckets that both were timed in, and only beyond the noise of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anyattn.core.measure.table import Timing

__all__ = ["NOISE_FLOOR", "Comparison", "compare", "fastest", "noise", "order"]

NOISE_FLOOR = 0.02
"""Differences below 2 % are noise, however small the spread of the samples was."""

Times = Mapping[str, Timing]


def noise(a: Timing, b: Timing) -> float:
    """Relative difference that two times must exceed: the larger spread, 2 % at least."""
    return max(NOISE_FLOOR, a.spread, b.spread)


@dataclass(frozen=True)
class Comparison:
    """One backend's time over another's: geometric mean, extremes, median noise, number of buckets."""

    ratio: float
    lowest: float
    highest: float
    noise: float
    buckets: int

    @property
    def faster(self) -> bool:
        """The first one is faster beyond the noise."""
        return self.ratio * (1 + self.noise) < 1

    @property
    def slower(self) -> bool:
        """The first one is slower beyond the noise."""
        return self.ratio > 1 + self.noise


def compare(one: str, other: str, entries: Iterable[Times]) -> Comparison | None:
    """`one` against `other`; None without a bucket that has both."""
    pairs = [(times[one], times[other]) for times in entries if one in times and other in times]
    if not pairs:
        return None
    ratios = [a.seconds / b.seconds for a, b in pairs]
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    spread = statistics.median(noise(a, b) for a, b in pairs)
    return Comparison(mean, min(ratios), max(ratios), spread, len(ratios))


def order(preferred: Sequence[str], entries: Sequence[Times]) -> list[str]:
    """Fastest first. Who is within the noise of the fastest is equal to it and keeps the preferred order.

    Backends without a bucket in common keep the preferred order as well.
    """
    left, ranked = list(preferred), []
    while left:
        best = _champion(left, entries)
        first = next(n for n in left if n == best or not _behind(n, best, entries))
        ranked.append(first)
        left.remove(first)
    return ranked


def _champion(names: Sequence[str], entries: Sequence[Times]) -> str:
    """The fastest by bare means: each is measured against the best of those before it."""
    best = names[0]
    for name in names[1:]:
        found = compare(name, best, entries)
        if found is not None and found.ratio < 1:
            best = name
    return best


def _behind(name: str, best: str, entries: Sequence[Times]) -> bool:
    found = compare(name, best, entries)
    return found is None or found.slower


def fastest(times: Times, preferred: Sequence[str]) -> str | None:
    """Of one bucket: the first of the preferred that is within the noise of the fastest; None without two."""
    known = [name for name in preferred if name in times]
    return order(known, [times])[0] if len(known) > 1 else None
