"""For one phase: every backend's verdict, and the rows that may serve it, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyattn.core.capabilities import BackendRecord, CapabilityRow, Phase, Preference
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.table import MeasuredTable
from anyattn.core.registry import Registry
from anyattn.core.select.choices import Choice
from anyattn.core.select.decision import Degraded, Rejected, Verdict
from anyattn.core.select.measured import NO_TIMES, RoleTimes, role_times
from anyattn.core.select.rank import Rank, rank
from anyattn.core.select.request import Request
from anyattn.core.select.validate import judge_rows, validate

__all__ = ["ROUTED", "Field", "Option", "survey"]


ROUTED = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY)
"""Phases whose steps may be routed; drafts stay with the backend that was decided."""


@dataclass(frozen=True)
class Option:
    """One row of one backend that passes, with the backend's place in the order (0 = first)."""

    record: BackendRecord
    row: CapabilityRow
    verdict: Verdict
    rank: Rank
    place: int

    @property
    def degraded(self) -> bool:
        """The row is second-rate."""
        return isinstance(self.verdict, Degraded)

    @property
    def cost(self) -> tuple[bool, int]:
        """Sort key: all degraded options come after all others."""
        return (self.degraded, self.place)


@dataclass(frozen=True)
class Field:
    """All candidates of a phase. `open` are the options if nobody had chosen, `options` those in play.

    `role`: whose measured times count, which are `times`. Mixed steps are a field of prefill's rows.
    """

    phase: Phase
    verdicts: Mapping[str, Verdict]
    open: tuple[Option, ...]
    choice: Choice | None = None
    times: RoleTimes = NO_TIMES
    of_role: Role | None = None

    @property
    def role(self) -> Role:
        """The phase's, unless another one is named."""
        return self.of_role or Role.of(self.phase)

    @property
    def options(self) -> tuple[Option, ...]:
        """Best first; with an explicit choice, the rows of that backend alone."""
        if self.choice is None:
            return self.open
        rank = Rank(self.choice.backend, self.choice.how, self.choice.source)
        return tuple(
            Option(o.record, o.row, o.verdict, rank, 0)
            for o in self.open
            if o.record.name == self.choice.backend
        )

    def relaxed(self) -> Field:
        """The field without its explicit choice."""
        return Field(self.phase, self.verdicts, self.open, times=self.times, of_role=self.of_role)

    def names(self) -> tuple[str, ...]:
        """Backends that pass on their own, best first."""
        return tuple(dict.fromkeys(o.record.name for o in self.open))


def survey(
    phase: Phase,
    request: Request,
    facts: HostFacts,
    registry: Registry,
    preferences: Sequence[Preference],
    tables: Sequence[MeasuredTable],
    choice: Choice | None,
    role: Role | None = None,
) -> Field:
    """Judge and rank all registered backends for one phase. `role`: whose times rank them."""
    judged = {r.name: judge_rows(r, phase, request, facts) for r in registry.records()}
    passing = {
        name: [item for item in rows if not isinstance(item[1], Rejected)]
        for name, rows in judged.items()
        if rows and not isinstance(rows[0][1], Rejected)
    }
    verdicts = {
        r.name: judged[r.name][0][1] if judged[r.name] else validate(r, phase, request, facts)
        for r in registry.records()
    }
    rows = {name: [row for row, _ in items] for name, items in passing.items()}
    times = role_times(tables, role or Role.of(phase), request, facts, rows)
    ranks = rank(tuple(passing), phase, request, facts, preferences, times)
    if len(ranks) == 1:
        ranks = (Rank(ranks[0].backend, "only", "no other backend passes"),)
    options = [
        Option(registry.get(entry.backend), row, verdict, entry, place)
        for place, entry in enumerate(ranks)
        for row, verdict in passing[entry.backend]
    ]
    if phase in ROUTED and choice is None:
        names = {registry.get(name).name for name in request.route or ()}
        options = [option for option in options if option.record.name in names] or options
    return Field(phase, verdicts, tuple(sorted(options, key=lambda o: o.cost)), choice, times, role)
