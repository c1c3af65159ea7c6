"""Which measured times count for a request on a host: where device, versions and bucket match."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anyattn import __version__
from anyattn.core.capabilities import CapabilityRow
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import EAGER, GRAPH, Bucket, Role, Shape, Workload
from anyattn.core.measure.table import MeasuredTable, Timing
from anyattn.core.measure.use import TableUse
from anyattn.core.measure.versions import same_release
from anyattn.core.select.libraries import providers_in_use
from anyattn.core.select.request import Request

__all__ = ["NO_TIMES", "Entry", "RoleTimes", "looked_at", "mismatch", "role_times", "runs_on"]

FEW_TOKENS = 16
"""Extends of up to so many new tokens a request are like verification, not like prefill."""
_NEAR = 1.0
"""A workload is near a bucket within one step of two in each count."""

Entry = tuple[Bucket, Mapping[str, Timing]]
Rows = Mapping[str, Sequence[CapabilityRow]]


@dataclass(frozen=True)
class RoleTimes:
    """Times that count for one role.

    Attributes:
        entries: those to rank by. routable: of the role itself, of every workload and both ways to run, to
            route by.
        remarks: what of the table doesn't count, and why.
    """

    table: MeasuredTable | None = None
    entries: tuple[Entry, ...] = ()
    routable: tuple[Entry, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def times(self) -> list[Mapping[str, Timing]]:
        """Of `entries`, without their buckets."""
        return [times for _, times in self.entries]


NO_TIMES = RoleTimes()


def mismatch(table: MeasuredTable, facts: HostFacts) -> str:
    """Why no time of a table counts on this host; empty if they do."""
    made = table.provenance
    if made.arch != facts.target:
        return f"made for {made.arch}; this is {facts.target}"
    if made.device != facts.device_name:
        return f"made on {made.device}; this is {facts.device_name or facts.target}"
    if made.units is not None and facts.num_units is not None and made.units != facts.num_units:
        return f"made with {made.units} cores or units of {made.device}; here are {facts.num_units}"
    return ""


def looked_at(
    tables: Iterable[MeasuredTable], facts: HostFacts, found: Iterable[RoleTimes]
) -> tuple[TableUse, ...]:
    """A record of every table; `found` are times of the phases that were ranked."""
    times = list(found)
    return tuple(_use(table, facts, times) for table in tables)


def _use(table: MeasuredTable, facts: HostFacts, found: Sequence[RoleTimes]) -> TableUse:
    p = table.provenance
    used = any(times.table is table and times.entries for times in found)
    remarks = dict.fromkeys(remark for times in found for remark in times.remarks)
    reason = "" if used else mismatch(table, facts) or "; ".join(remarks) or "nothing to compare"
    return TableUse(table.name, p.device, p.arch, p.versions, p.date, p.commit, p.command, used, reason)


def role_times(
    tables: Iterable[MeasuredTable], role: Role, request: Request, facts: HostFacts, rows: Rows
) -> RoleTimes:
    """Times of the first table that fits the host and knows the model's shapes.

    Args:
        rows: backend -> its rows that pass, best first: a time counts for the libraries that they run on.
    """
    remarks: list[str] = []
    for table in tables:
        if mismatch(table, facts):
            continue
        shaped = _of_model(table, role, request)
        if not shaped:
            remarks.append(f"{table.name} has no bucket of {_shapes(request)[0]} for {role.value}")
            continue
        stale = _stale(table, facts, rows)
        timed = {n for _, times in shaped for n in times if n in rows}
        remarks += [f"{name} doesn't count: {why}" for name, why in stale.items() if name in timed]
        current = timed - set(stale)
        fresh = [(b, {n: t for n, t in times.items() if n in current}) for b, times in shaped]
        compared = [(b, times) for b, times in fresh if len(times) > 1]
        ranking = _as_asked([e for e in compared if _ranks(e[0], role)], request)
        routable = _as_asked([e for e in compared if e[0].role is role], request)
        chosen, missing = _of_workload(_run_as_asked(ranking, role, request), role, request)
        remarks += [f"{table.name} {missing}"] if missing else []
        return RoleTimes(table, chosen, tuple(routable), tuple(remarks))
    return RoleTimes(remarks=tuple(remarks))


def _shapes(request: Request) -> tuple[Shape, ...]:
    found = (Shape.of(spec, request.dtype, request.kv_dtype) for spec in request.distinct_specs)
    return tuple(dict.fromkeys(found))


def _serves(bucket: Bucket, role: Role) -> bool:
    """The bucket says something of the role: its own, and to verification, extends of few tokens."""
    return bucket.role is role or _ranks(bucket, role)


def _ranks(bucket: Bucket, role: Role) -> bool:
    """The role is ranked by the bucket: verification by extends of few tokens too, prefill by all others."""
    few = bucket.role is Role.PREFILL and bucket.new_tokens <= FEW_TOKENS
    if role is Role.VERIFY:
        return few or bucket.role is role
    return bucket.role is role and not few


def _of_model(table: MeasuredTable, role: Role, request: Request) -> list[Entry]:
    """Entries of the model's shapes, or of other shards of them."""
    mine = [(b, t) for b, t in table.entries.items() if _serves(b, role)]
    found: list[Entry] = []
    for shape in _shapes(request):
        exact = [entry for entry in mine if entry[0].shape == shape]
        found += exact or _nearest_shard(shape, [e for e in mine if e[0].shape.is_sharded(shape)])
    return found


def _as_asked(found: Sequence[Entry], request: Request) -> Sequence[Entry]:
    """Those on the page and layout that are asked for, where there are any."""
    for name, value in (("page", request.page_size), ("layout", request.layout)):
        found = [e for e in found if value in (None, getattr(e[0], name))] or found
    return found


def _nearest_shard(shape: Shape, alike: Sequence[Entry]) -> list[Entry]:
    sizes = {bucket.shape.kv_heads for bucket, _ in alike}
    if not sizes:
        return []
    near = min(sizes, key=lambda heads: max(heads, shape.kv_heads) / min(heads, shape.kv_heads))
    return [entry for entry in alike if entry[0].shape.kv_heads == near]


def _run_as_asked(entries: Sequence[Entry], role: Role, request: Request) -> tuple[Entry, ...]:
    """Prompts run eagerly, the rest as graphs unless the workload says otherwise; else what there is."""
    graphs = role in (Role.DECODE, Role.VERIFY) and (request.workload or Workload()).graphs
    wanted = GRAPH if graphs else EAGER
    return tuple(e for e in entries if e[0].run == wanted) or tuple(entries)


def _of_workload(entries: tuple[Entry, ...], role: Role, request: Request) -> tuple[tuple[Entry, ...], str]:
    """Entries near the workload, all without one; and what to say where there are none."""
    hint = request.workload
    if hint is None or not entries:
        return entries, ""
    counts: tuple[int | None, int | None, int | None] = (hint.requests, hint.kv_len, None)
    if role is Role.PREFILL:
        counts = (None, None, hint.new_tokens)
    elif role is Role.MIXED:
        counts = (hint.requests, hint.kv_len, hint.new_tokens)
    gaps = [bucket.distance(*counts) for bucket, _ in entries]
    near = tuple(e for e, gap in zip(entries, gaps, strict=True) if gap <= _NEAR)
    if near:
        return near, ""
    nearest = entries[gaps.index(min(gaps))][0]
    return (), f"has no bucket near the workload for {role.value}; the nearest is {nearest}"


def _stale(table: MeasuredTable, facts: HostFacts, rows: Rows) -> dict[str, str]:
    """Backend -> which version it was measured with, where that isn't this host's."""
    found: dict[str, str] = {}
    for name, passing in rows.items():
        for library, here in runs_on(passing[0], facts).items():
            then = table.provenance.versions.get(library)
            if then is None or (here is not None and not same_release(then, here)):
                found.setdefault(name, f"measured with {library} {then or '(unknown)'}, here is {here}")
    return found


def runs_on(row: CapabilityRow, facts: HostFacts) -> dict[str, str | None]:
    """Versions that decide a backend's speed: of this package and its libraries, or of torch without any.

    None is a version that a simulated host leaves open.
    """
    libraries = {library.distribution: library.version for library in providers_in_use(row, facts)}
    return {"anyattn": __version__, **(libraries or {"torch": facts.torch})}
