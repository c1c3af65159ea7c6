"""Two sets of measured times: whose winner changed, who became faster or slower beyond the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.core.measure.bucket import Bucket
from anyattn.core.measure.compare import Comparison, compare, fastest, noise
from anyattn.core.measure.table import Times

__all__ = ["TimeChange", "TimesDiff", "WinnerChange", "cell_times", "diff_times"]

Cells = Mapping[str, Times]
"""Name of a cell -> times by backend."""


@dataclass(frozen=True)
class TimeChange:
    """One backend in one cell: new over old time, which differ by more than the noise of both."""

    cell: str
    backend: str
    ratio: float
    noise: float


@dataclass(frozen=True)
class WinnerChange:
    """A cell whose fastest backend changed; `ratio`: the new one's time over the old one's, now."""

    cell: str
    old: str
    new: str
    ratio: float


@dataclass(frozen=True)
class TimesDiff:
    """`means`: per backend, new over old time, over the cells of both. `lost`, `added`: cells of one side.
    `gone`: backends that the old side timed in a cell of both and the new one didn't, as (cell, backend).
    """

    cells: int
    winners: tuple[WinnerChange, ...]
    times: tuple[TimeChange, ...]
    means: Mapping[str, Comparison]
    lost: tuple[str, ...]
    added: tuple[str, ...]
    gone: tuple[tuple[str, str], ...] = ()

    def regressions(self, percent: float) -> tuple[TimeChange, ...]:
        """Changes for the worse by more than `percent`, and beyond the noise."""
        return tuple(change for change in self.times if change.ratio > 1 + percent / 100)


def cell_times(entries: Mapping[Bucket, Times]) -> Cells:
    """A table's entries by a name that tells the whole bucket."""
    return {f"{bucket}, {bucket.layout}, {bucket.shape}": times for bucket, times in entries.items()}


def diff_times(old: Cells, new: Cells) -> TimesDiff:
    """What changed from `old` to `new` in the cells of both."""
    shared = [cell for cell in old if cell in new]
    winners = [change for cell in shared if (change := _winner(cell, old[cell], new[cell]))]
    changes = [change for cell in shared for change in _changes(cell, old[cell], new[cell])]
    pairs = [_sides(old[cell], new[cell]) for cell in shared]
    names = dict.fromkeys(name for cell in shared for name in old[cell] if name in new[cell])
    means = {name: found for name in names if (found := compare(f"new {name}", f"old {name}", pairs))}
    return TimesDiff(
        len(shared), tuple(winners), tuple(changes), means,
        tuple(c for c in old if c not in new), tuple(c for c in new if c not in old),
        tuple((cell, name) for cell in shared for name in old[cell] if name not in new[cell]),
    )  # fmt: skip


def _sides(old: Times, new: Times) -> dict[str, Any]:
    return {f"old {n}": t for n, t in old.items()} | {f"new {n}": t for n, t in new.items()}


def _changes(cell: str, old: Times, new: Times) -> Sequence[TimeChange]:
    found = []
    for name in (n for n in old if n in new):
        ratio, allowed = new[name].seconds / old[name].seconds, noise(old[name], new[name])
        if max(ratio, 1 / ratio) > 1 + allowed:
            found.append(TimeChange(cell, name, ratio, allowed))
    return found


def _winner(cell: str, old: Times, new: Times) -> WinnerChange | None:
    """None if the old winner is still within the noise of the fastest, or isn't there any more."""
    was = min(old, key=lambda name: old[name].seconds)
    now = fastest(new, [was, *(name for name in new if name != was)])
    if now is None or now == was or was not in new:
        return None
    return WinnerChange(cell, was, now, new[now].seconds / new[was].seconds)
