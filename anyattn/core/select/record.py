"""The decision record of a solved selection: choices, a verdict on everybody, versions, notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from anyattn import __version__
from anyattn.core.capabilities import BackendRecord, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.table import MeasuredTable
from anyattn.core.measure.use import TableUse
from anyattn.core.registry import Registry
from anyattn.core.select.choices import Wishes
from anyattn.core.select.decision import (
    SCHEMA,
    Candidate,
    Decision,
    Degraded,
    KVChoice,
    PhaseChoice,
    Reason,
    ReasonCode,
    Rejected,
    Route,
    Verdict,
)
from anyattn.core.select.explain import phrase
from anyattn.core.select.joint import Joint
from anyattn.core.select.libraries import importable, providers_in_use
from anyattn.core.select.measured import RoleTimes, looked_at
from anyattn.core.select.options import ROUTED, Field, Option
from anyattn.core.select.pages import describe_pages, kernel_page
from anyattn.core.select.request import Request
from anyattn.core.select.routes import members, rules_of
from anyattn.core.select.validate import distance, is_built, is_near

__all__ = ["record"]

_POOL_CODES = frozenset({ReasonCode.PAGE_SIZE, ReasonCode.LAYOUT})


def record(
    request: Request,
    facts: HostFacts,
    registry: Registry,
    wishes: Wishes,
    fields: Mapping[Phase, Field],
    joint: Joint,
    tables: Sequence[MeasuredTable] = (),
    mixed: Field | None = None,
) -> Decision:
    """The decision, with a verdict on every backend in every phase.

    `tables` are those it was ranked by, `mixed` prefill's backends in mixed steps.
    """
    told = _told(request, fields, mixed)

    def choice(phase: Phase, option: Option) -> PhaseChoice:
        return _choice(request, fields[phase], option, joint)

    candidates = tuple(
        _candidate(entry, request, facts, field, joint)
        for entry in registry.records()
        for field in fields.values()
    )
    ranked = [field.times for field in told if field.choice is None]
    measured = looked_at(tables, facts, ranked)
    routes = tuple(_routes(request, told, joint))
    return Decision(
        schema=SCHEMA,
        request=request,
        host=facts,
        kv=KVChoice(joint.page, joint.layout, request.kv_dtype),
        prefill=choice(Phase.PREFILL, joint.prefill),
        decode=choice(Phase.DECODE, joint.decode),
        verify=None if joint.verify is None else choice(Phase.VERIFY, joint.verify),
        draft=None if joint.draft is None else choice(Phase.DRAFT, joint.draft),
        mixed=_mixed(request, mixed, joint, routes),
        candidates=candidates,
        versions=_versions(facts, joint),
        notes=(
            *_notes(wishes, fields, joint),
            *_measured_notes(measured, ranked),
            *_route_notes(request, told, routes),
        ),
        routes=routes,
        measured=measured,
    )


def _measured_notes(measured: Sequence[TableUse], ranked: Sequence[RoleTimes]) -> Iterator[str]:
    """Which table isn't used, or what of one that is; nothing where every phase was chosen explicitly."""
    unused = [table for table in measured if not table.used] if ranked else []
    for table in unused:
        yield f"measured table {table.table} isn't used: {table.reason}"
    if len(unused) < len(measured):
        yield from dict.fromkeys(f"measured: {text}" for times in ranked for text in times.remarks)


def _told(request: Request, fields: Mapping[Phase, Field], mixed: Field | None) -> list[Field]:
    """Fields whose measured times and routes are spoken of: those of steps that this process has."""
    told = [fields[phase] for phase in ROUTED if phase is not Phase.VERIFY or request.speculative]
    return [*told, *([mixed] if mixed is not None and mixed.times.routable else [])]


def _routes(request: Request, told: Sequence[Field], joint: Joint) -> Iterator[Route]:
    """Roles where more than one backend is the fastest of some measured step."""
    for field in told if request.route is not None else ():
        if joint.of(field.role) is None:
            continue
        able = members(field, joint, request)
        rules = rules_of(field, joint, tuple(able))
        used = {rule.backend for rule in rules}
        first = next(iter(able))
        if used - {first}:
            names = [name for name in able if name == first or name in used]
            chosen = tuple(_choice(request, field, able[name], joint) for name in names)
            table = field.times.table
            yield Route(field.role, chosen, rules, "" if table is None else table.name)


def _mixed(
    request: Request, field: Field | None, joint: Joint, routes: Sequence[Route]
) -> PhaseChoice | None:
    """Who takes mixed steps, where that isn't simply whoever takes prefill.

    Where prefill is routed and mixed steps have one winner, that one is told, so that they aren't routed
    by the sizes of prefill.
    """
    if field is None or field.choice is not None:
        return None
    winner, routed = joint.of(field.role), {route.role for route in routes}
    assert winner is not None
    alone = field.times.routable and Role.PREFILL in routed and field.role not in routed
    if joint.mixed is None and alone:
        mine = [o for o in field.options if o.record.name == winner.record.name]
        return _choice(request, field, next((o for o in mine if o.row == winner.row), winner), joint)
    return None if joint.mixed is None else _choice(request, field, joint.mixed, joint)


def _route_notes(request: Request, told: Sequence[Field], routes: Sequence[Route]) -> Iterator[str]:
    routed = {route.role: route for route in routes}
    for field in told if request.route is not None else ():
        name = field.role.value
        if field.role in routed:
            shares = Counter(rule.backend for rule in routed[field.role].rules)
            parts = ", ".join(f"{backend} {count}" for backend, count in shares.most_common())
            yield f"{name}: routed by measured steps ({parts})"
        elif field.choice is not None:
            yield f"{name}: not routed, it was chosen explicitly"
        else:
            compared = "one backend is the fastest of every measured step"
            nothing = "no measured table compares backends for this model and device"
            yield f"{name}: not routed, {compared if field.times.routable else nothing}"


def _choice(request: Request, field: Field, option: Option, joint: Joint) -> PhaseChoice:
    page = kernel_page(option.row, joint.page, joint.layout)
    kind = request.model_kind
    return PhaseChoice(
        backend=option.record.name,
        target=option.record.targets.get(kind),
        method=option.row.method,
        built=is_built(option.record, kind),
        kernel_page=page or joint.page,  # never None: solve_joint only takes rows that fit
        how=option.rank.how,
        verdict=_with_cause(option.verdict, field),
        row=option.row,
        evidence=option.rank.evidence,
    )


def _with_cause(verdict: Verdict, field: Field) -> Verdict:
    """A degraded winner names the nearest better candidate for this chip and model, and its obstacle."""
    refused = {n: v for n, v in field.verdicts.items() if isinstance(v, Rejected) and is_near(v)}
    better = any(not option.degraded for option in field.open)
    if not isinstance(verdict, Degraded) or better or not refused:
        return verdict
    name, nearest = min(refused.items(), key=lambda item: distance(item[1]))
    return Degraded(replace(verdict.reason, hint=f"nearest: {name}: {phrase(nearest.reasons[0])}"))


def _candidate(
    entry: BackendRecord, request: Request, facts: HostFacts, field: Field, joint: Joint
) -> Candidate:
    rows = [o for o in field.open if o.record.name == entry.name]
    fitting = [o for o in rows if kernel_page(o.row, joint.page, joint.layout) is not None]
    verdict = field.verdicts[entry.name]
    if field.choice is not None and rows and entry.name != field.choice.backend:
        allowed = f"{entry.name} passes too"
        verdict = Rejected((Reason(ReasonCode.EXPLICIT_OTHER, field.choice.source, allowed),))
    elif rows and not fitting:
        verdict = Rejected((_no_joint(rows[0], joint),))
    elif fitting:
        verdict = _with_cause(fitting[0].verdict, field)
    row = (fitting or rows)[0].row if rows else None
    state = importable(row, facts) if row is not None else _importable_of(entry, field.phase, facts)
    return Candidate(entry.name, field.phase, verdict, state, is_built(entry, request.model_kind))


def _importable_of(entry: BackendRecord, phase: Phase, facts: HostFacts) -> str:
    """Of a rejected backend: that of its best row for the phase, whatever the model."""
    states = {importable(row, facts) for row in entry.rows if phase in row.phases}
    return next((s for s in ("yes", "unknown") if s in states), "no")


def _no_joint(option: Option, joint: Joint) -> Reason:
    others = dict.fromkeys(o.record.name for o in (joint.prefill, joint.decode))
    beside = f" beside {' and '.join(others)}"
    layouts = ", ".join(option.row.layouts)
    if joint.layout not in option.row.layouts:
        return Reason(ReasonCode.NO_JOINT_LAYOUT, f"layout {joint.layout}{beside}", f"layout {layouts}")
    asked = f"page {joint.page}, {joint.layout}{beside}"
    return Reason(ReasonCode.NO_JOINT_LAYOUT, asked, f"pages of {describe_pages(option.row)}")


def _notes(wishes: Wishes, fields: Mapping[Phase, Field], joint: Joint) -> Iterator[str]:
    for source in (wishes.page_source, wishes.layout_source):
        if source.startswith(("ANYATTN_", "pinned")):
            yield f"KV pool: {source}"
    for phase, field in fields.items():
        if joint.of(phase) is None:
            who = f"{field.choice.source}, which can't" if field.choice else "no backend can"
            yield f"{phase.value}: left empty, {who} serve it with this model and pool"
        for name, verdict in field.verdicts.items():
            codes = {r.code for r in verdict.reasons} if isinstance(verdict, Rejected) else set()
            if codes and codes <= _POOL_CODES and phase in (Phase.PREFILL, Phase.DECODE):
                yield f"{phase.value}: only the page or layout asked for keeps {name} out"


def _versions(facts: HostFacts, joint: Joint) -> dict[str, str]:
    """Of this package, torch, the runtime and the libraries that the chosen rows run on."""
    rows = [option.row for phase in Phase if (option := joint.of(phase)) is not None]
    libraries = {lib.distribution: lib.version for row in rows for lib in providers_in_use(row, facts)}
    found = {"anyattn": __version__, "torch": facts.torch, "runtime": facts.runtime, **libraries}
    return {name: version for name, version in found.items() if version is not None}
