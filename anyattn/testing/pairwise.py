"""Pairwise covering arrays: few rows in which every feasible pair of values of any two axes stands together.

Greedy, one row at a time (after AETG, Cohen et al., IEEE TSE 23(7), 1997): fix a pair that no row has yet,
then give each other axis the value that covers most uncovered pairs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.errors import ConfigError

__all__ = ["Coverage", "Pair", "Row", "covering_rows", "pairs_of", "random_row"]

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two `(axis, index of its value)`, in the order of the axes."""
Feasible = Callable[[Mapping[str, Any]], bool]
"""Can this partial row be completed? It may say yes too often; rows that end badly are dropped."""

_ROW_TRIES = 1000
_TRIES = 12  # completions tried, in other orders of the axes, before a pair counts as impossible


@dataclass(frozen=True)
class Coverage:
    """Pairs that stand in some row, and pairs that can stand in a row at all."""

    covered: int
    possible: int

    def __str__(self) -> str:
        share = 100.0 * self.covered / self.possible if self.possible else 100.0
        return f"{self.covered} of {self.possible} pairs ({share:.1f} %)"


def pairs_of(axes: Mapping[str, Sequence[Any]], row: Mapping[str, Any]) -> set[Pair]:
    """The pairs that a whole row covers."""
    places = [(name, values.index(row[name])) for name, values in axes.items()]
    return set(itertools.combinations(places, 2))


def covering_rows(
    axes: Mapping[str, Sequence[Any]], feasible: Feasible, seed: int | str, *, limit: int | None = None
) -> tuple[list[Row], Coverage]:
    """Rows that cover all feasible pairs, and what they cover.

    Args:
        axes: name -> distinct values. The order matters little.
        limit: rows at most; pairs that are left then count as possible, not as covered.

    Raises:
        ConfigError: an axis without values, or with a value twice.
    """
    for name, values in axes.items():
        if not values or len({repr(v) for v in values}) != len(values):
            raise ConfigError(f"values of axis {name}", asked=list(values), allowed="at least one, distinct")
    rng = random.Random(str(seed))
    open_pairs = _all_pairs(axes)
    possible = set(open_pairs)
    rows: list[Row] = []
    while open_pairs and (limit is None or len(rows) < limit):
        pair = next(iter(open_pairs))
        row = _row_with(axes, pair, open_pairs, feasible, rng)
        if row is None:
            del open_pairs[pair]
            possible.discard(pair)
            continue
        rows.append(row)
        for found in pairs_of(axes, row):
            open_pairs.pop(found, None)
    return rows, Coverage(len(possible) - len(open_pairs), len(possible))


def random_row(axes: Mapping[str, Sequence[Any]], feasible: Feasible, rng: random.Random) -> Row:
    """A row drawn at random. Raises `ConfigError` if there seems to be none.

    A backend that serves little leaves few rows, which many orders miss.
    """
    order = list(axes)
    for _ in range(_ROW_TRIES):
        rng.shuffle(order)
        chosen = _complete(axes, {}, order, {}, feasible, rng)
        if chosen is not None:
            return {name: axes[name][chosen[name]] for name in axes}
    raise ConfigError("no row fits the rules between the axes", asked=order)


def _all_pairs(axes: Mapping[str, Sequence[Any]]) -> dict[Pair, None]:
    """Every pair of values of two axes, ordered so that runs repeat."""
    return {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(axes, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }


def _row_with(
    axes: Mapping[str, Sequence[Any]], pair: Pair, uncovered: Mapping[Pair, None], feasible: Feasible,
    rng: random.Random,
) -> Row | None:  # fmt: skip
    start = dict(pair)
    if not feasible({name: axes[name][index] for name, index in start.items()}):
        return None
    others = [name for name in axes if name not in start]
    for _ in range(_TRIES):
        rng.shuffle(others)
        chosen = _complete(axes, dict(start), others, uncovered, feasible, rng)
        if chosen is not None:
            return {name: axes[name][chosen[name]] for name in axes}
    return None


def _complete(
    axes: Mapping[str, Sequence[Any]], chosen: dict[str, int], order: Iterable[str],
    uncovered: Mapping[Pair, None], feasible: Feasible, rng: random.Random,
) -> dict[str, int] | None:  # fmt: skip
    """Greedy in the given order; None where an axis has no value left."""
    rank = {name: place for place, name in enumerate(axes)}
    values = {name: axes[name][index] for name, index in chosen.items()}
    for name in order:
        best: tuple[int, float, int] | None = None
        for index, value in enumerate(axes[name]):
            values[name] = value
            if not feasible(values):
                continue
            gain = sum(_pair(name, index, other, chosen[other], rank) in uncovered for other in chosen)
            candidate = (gain, rng.random(), index)
            best = candidate if best is None else max(best, candidate)
        if best is None:
            return None
        chosen[name] = best[2]
        values[name] = axes[name][best[2]]
    return chosen


def _pair(a: str, i: int, b: str, j: int, rank: Mapping[str, int]) -> Pair:
    return ((a, i), (b, j)) if rank[a] < rank[b] else ((b, j), (a, i))
