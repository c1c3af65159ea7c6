"""Routes of a decision: for each measured step the fastest backend on the pool that was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyattn.core.capabilities import Phase
from anyattn.core.measure.compare import order
from anyattn.core.measure.rules import RouteRule
from anyattn.core.measure.table import Timing
from anyattn.core.select.joint import Joint
from anyattn.core.select.measured import Entry
from anyattn.core.select.options import Field, Option
from anyattn.core.select.pages import kernel_page
from anyattn.core.select.request import Request

__all__ = ["members", "rules_of"]

Times = Mapping[str, Timing]


def members(field: Field, joint: Joint, request: Request) -> dict[str, Option]:
    """Who may take steps of a phase: the decided backend first, then all on its pool, as ranked.

    Nobody but the decided one where it was chosen explicitly, nobody second-rate beside a better one, and in
    decode nobody who would take its graphs away.
    """
    first = joint.of(field.phase)
    assert first is not None
    found = {first.record.name: first}
    if request.route is None or field.choice is not None:
        return found
    for option in field.options:
        fits = kernel_page(option.row, joint.page, joint.layout) is not None
        recorded = field.phase is not Phase.DECODE or bool(option.row.graph) >= bool(first.row.graph)
        if fits and recorded and option.degraded <= first.degraded:
            found.setdefault(option.record.name, option)
    return found


def rules_of(field: Field, joint: Joint, names: Sequence[str]) -> tuple[RouteRule, ...]:
    """A rule for each measured step that timed the first of `names` and another one.

    Times within the noise of the fastest keep the order of `names`.
    """
    steps: dict[tuple[str, int, int, int], list[Times]] = {}
    for bucket, times in _on_pool(field.times.routable, joint):
        if names[0] in times:
            key = (bucket.run, bucket.requests, bucket.kv_len, bucket.new_tokens)
            steps.setdefault(key, []).append({n: times[n] for n in names if n in times})
    found = []
    for key, entries in steps.items():
        timed = [n for n in names if all(n in times for times in entries)]
        if len(timed) > 1:
            found.append(RouteRule(*key, order(timed, entries)[0]))
    return tuple(found)


def _on_pool(entries: Sequence[Entry], joint: Joint) -> Sequence[Entry]:
    """Those measured on the page and layout of the pool, where there are any."""
    for name, value in (("page", joint.page), ("layout", joint.layout)):
        entries = [entry for entry in entries if getattr(entry[0], name) == value] or entries
    return entries
