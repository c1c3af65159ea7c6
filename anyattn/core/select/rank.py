"""Order of backends that all pass: measured on this device, else preferred for it, else registered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyattn.core.capabilities import ModelKind, Phase, Preference
from anyattn.core.facts import HostFacts
from anyattn.core.measure.compare import Comparison, compare, order
from anyattn.core.select.explain import UNLISTED
from anyattn.core.select.measured import NO_TIMES, RoleTimes
from anyattn.core.select.request import Request

__all__ = ["Rank", "rank", "told"]

_ALSO = {Phase.VERIFY: Phase.PREFILL, Phase.DRAFT: Phase.DECODE}
"""Phases whose kernels are those of another: its list counts where they have none."""


@dataclass(frozen=True)
class Rank:
    """A backend's place in the order: how it got there, with evidence."""

    backend: str
    how: str
    evidence: str


def _preferred(
    phase: Phase, kind: ModelKind, facts: HostFacts, preferences: Sequence[Preference]
) -> dict[str, str]:
    """Backend -> evidence, best first, of the lists for this exact architecture."""
    found: dict[str, str] = {}
    for wanted in (phase, _ALSO.get(phase)):
        for entry in preferences:
            if (entry.phase, entry.kind) == (wanted, kind) and facts.target in entry.architectures:
                library = f", {entry.library}" if entry.library else ""
                for name in entry.order:
                    found.setdefault(name, f"{entry.evidence} ({entry.date}{library})")
        if found:
            break
    return found


def rank(
    names: Sequence[str],
    phase: Phase,
    request: Request,
    facts: HostFacts,
    preferences: Sequence[Preference],
    times: RoleTimes = NO_TIMES,
) -> tuple[Rank, ...]:
    """Backends best first. `names` come in registration order, which decides where nothing else does.

    Measured times reorder those that they compare, where the difference exceeds the noise. A backend
    without a time stays behind the one that it was preferred next after: nothing speaks against that.
    """
    listed = _preferred(phase, request.model_kind, facts, preferences)
    places = {name: i for i, name in enumerate(listed)}
    wanted = sorted(names, key=lambda n: places.get(n, len(places)))
    fallback = f"{UNLISTED} for {facts.target}: order of registration"
    ranks = {n: Rank(n, "priority", listed.get(n, fallback)) for n in wanted}
    timed = [n for n in wanted if any(n in entry for entry in times.times)]
    if len(timed) < 2:
        return tuple(ranks.values())
    fastest = order(timed, times.times)
    for name in timed:
        ranks[name] = _with_time(ranks[name], timed[0], fastest, times)
    return tuple(ranks[name] for name in _in_order(wanted, fastest))


def _in_order(wanted: Sequence[str], fastest: Sequence[str]) -> list[str]:
    """`fastest`, each followed by those without a time that came after it; who came first stays first."""
    groups: dict[str, list[str]] = {"": []}
    leader = ""
    for name in wanted:
        leader = name if name in fastest else leader
        groups.setdefault(leader, []).append(name)
    return [name for leader in ("", *fastest) for name in groups[leader]]


def _with_time(entry: Rank, preferred: str, fastest: Sequence[str], times: RoleTimes) -> Rank:
    """What the times say of one backend: the fastest beside the preferred one, the others beside the fastest.

    Where the two are within the noise of each other, it's the list that decided.
    """
    rivals = [n for n in dict.fromkeys((preferred, *fastest)) if n != entry.backend]
    if entry.backend != fastest[0]:
        rivals.sort(key=lambda n: n != fastest[0])
    found = ((n, compare(entry.backend, n, times.times)) for n in rivals)
    rival, seen = next((n, c) for n, c in found if c is not None)
    if not (seen.faster or seen.slower):
        within = f"measured within {seen.noise:.0%} of {rival}, {_where(seen, times)}"
        return Rank(entry.backend, "priority", f"{entry.evidence}; {within}")
    return Rank(entry.backend, "measured", told(seen, rival, times))


def told(seen: Comparison, rival: str, times: RoleTimes) -> str:
    """How much faster or slower than the rival, over which buckets of which table."""
    ratio = 1 / seen.ratio if seen.faster else seen.ratio
    spread = sorted((1 / seen.lowest, 1 / seen.highest) if seen.faster else (seen.lowest, seen.highest))
    word = "faster" if seen.faster else "slower"
    extremes = f" ({spread[0]:.2f} to {spread[1]:.2f})" if seen.buckets > 1 else ""
    return f"{ratio:.2f} x {word} than {rival}{extremes}, {_where(seen, times)}"


def _where(seen: Comparison, times: RoleTimes) -> str:
    assert times.table is not None
    made, many = times.table.provenance, "s" if seen.buckets > 1 else ""
    return f"{seen.buckets} bucket{many} of table {times.table.name} ({made.device}, {made.date})"
