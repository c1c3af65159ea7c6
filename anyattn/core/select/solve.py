"""`decide`: request + host + records -> one `Decision` for prefill, decode, verify and draft together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyattn.core.capabilities import Phase, Preference
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.shipped import tables_for
from anyattn.core.measure.table import MeasuredTable
from anyattn.core.registry import Registry
from anyattn.core.select.choices import Wishes, gather
from anyattn.core.select.decision import Decision
from anyattn.core.select.joint import Joint, solve_joint
from anyattn.core.select.options import Field, survey
from anyattn.core.select.record import record
from anyattn.core.select.refuse import refuse_choices, refuse_nobody, refuse_pool
from anyattn.core.select.request import Request
from anyattn.errors import UnknownNameError

__all__ = ["decide"]


def decide(
    request: Request,
    facts: HostFacts,
    registry: Registry,
    preferences: Sequence[Preference],
    *,
    environ: Mapping[str, str] | None = None,
    pins: Sequence[Mapping[str, Any]] | None = None,
    tables: Sequence[MeasuredTable] | None = None,
) -> Decision:
    """Choose backends, pool page and layout. Imports no backend.

    Args:
        environ: variables to read, default the process's own.
        pins: pinned decisions (see `choices.load_pins`), default those of `ANYATTN_PINS`.
        tables: measured times to rank by, default those of `ANYATTN_MEASUREMENTS`, else those that ship.

    Raises:
        UnknownNameError: an unknown backend or layout.
        SelectionError: an explicit choice that can't be honoured, or nobody for prefill or decode.
    """
    wishes = gather(request, facts, registry, environ=environ, pins=pins)
    _check_layout(wishes.layout, registry)
    if tables is None:
        tables = tables_for(facts.target, environ)
    asked = replace(request, page_size=wishes.page_size, layout=wishes.layout)
    fields = {
        phase: survey(phase, asked, facts, registry, preferences, tables, wishes.phases.get(phase))
        for phase in Phase
    }
    mixed = None
    if any(bucket.role is Role.MIXED for table in tables for bucket in table.entries):
        wish = wishes.phases.get(Phase.PREFILL)
        mixed = survey(Phase.PREFILL, asked, facts, registry, preferences, tables, wish, Role.MIXED)
    joint = _solve(fields, _required(request, wishes), facts, wishes, mixed)
    return record(request, facts, registry, wishes, fields, joint, tables, mixed)


def _check_layout(layout: str | None, registry: Registry) -> None:
    known = {name for record in registry.records() for row in record.rows for name in row.layouts}
    if layout is not None and layout not in known:
        raise UnknownNameError("layout", layout, known)


def _required(request: Request, wishes: Wishes) -> frozenset[Phase]:
    """Phases that must be served: the two main ones, and roles that somebody asked for by name.

    `backend=` names every phase; for verify and draft it binds where the process speculates at all.
    """
    named = {p for p, choice in wishes.phases.items() if choice.strict or request.speculative}
    return frozenset({Phase.PREFILL, Phase.DECODE} | named)


def _solve(
    fields: Mapping[Phase, Field],
    required: frozenset[Phase],
    facts: HostFacts,
    wishes: Wishes,
    mixed: Field | None,
) -> Joint:
    needed = [field for phase, field in fields.items() if phase in required]
    failing = [f for f in needed if f.choice is not None and not f.options]
    if failing:
        raise refuse_choices(failing, fields, facts, wishes)
    for field in needed:
        if not field.options:
            raise refuse_nobody(field, facts, wishes)
    joint = solve_joint(
        fields, required,
        platform=facts.platform, page_size=wishes.page_size, layout=wishes.layout, mixed=mixed,
    )  # fmt: skip
    if joint is None:
        raise refuse_pool(fields, facts, wishes)
    return joint
