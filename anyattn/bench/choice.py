"""What the routed choice comes to: against the best backend of each cell, and against engines' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyattn.bench.routed import label, routed
from anyattn.bench.summary import (
    CHOICE,
    ROUTED,
    Spread,
    describe,
    grouped,
    head,
    phase_of,
    policies,
    policy_times,
    times_of,
)

__all__ = ["BEST", "choice_lines", "defaults", "misses", "routed_choice"]

BEST = "best backend of the cell"
"""Row of `routed_choice`: how near the routed choice comes to always taking the fastest; at most 1."""

_LOW = 0.97


def routed_choice(document: Mapping[str, Any], takers: Mapping[str, str]) -> dict[str, dict[str, Spread]]:
    """Kind of step -> whom -> their time over that of the backend that a step is routed to.

    Args:
        takers: cell and mode -> that backend, as `routed` tells it.
    """
    found: dict[str, dict[str, Spread]] = {}
    taken = [entry for entry in document["cells"] if label(entry) in takers]
    for phase, members in grouped(taken, phase_of).items():
        ratios: dict[str, dict[str, float]] = {}
        for entry in members:
            ours = times_of(entry, "backend", counting=False)[takers[label(entry)]]
            for name, seconds in policy_times(entry).items():
                ratios.setdefault(BEST if name == ROUTED else name, {})[label(entry)] = seconds / ours
        ratios.pop(CHOICE, None)  # what was selected when the cell was timed
        found[phase] = {name: Spread.of(values) for name, values in ratios.items()}
    return found


def misses(document: Mapping[str, Any], takers: Mapping[str, str], limit: float = _LOW) -> list[str]:
    """Cells where the routed choice reaches less than `limit` of the best backend."""
    found = []
    for entry in (e for e in document["cells"] if label(e) in takers):
        times, name = times_of(entry, "backend", counting=False), takers[label(entry)]
        best = min(times, key=lambda n: times[n])
        if times[best] < limit * times[name]:
            found.append(f"{label(entry)}: {name}, {times[best] / times[name]:.3f} of {best}")
    return found


def choice_lines(document: Mapping[str, Any]) -> list[str]:
    """The routed choice as text; nothing where no table speaks of the result."""
    lines = []
    for source, takers in routed(document).items():
        title = f"Routed choice, by {source} (their time over ours; above 1: ours is faster)"
        lines += describe(title, routed_choice(document, takers))
        lines += [f"  below {_LOW} of the best backend: {told}" for told in misses(document, takers)]
    return lines


def defaults(document: Mapping[str, Any]) -> str:
    """Policies against each other, and the routed choice."""
    title = "Policies (their time over ours; above 1: ours is faster)"
    lines = [*head(document), *describe(title, policies(document["cells"])), *choice_lines(document)]
    return "\n".join(lines)
