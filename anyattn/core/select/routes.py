"""Routes of a decision: for each measured step the fastest backend on the pool that was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyattn.core.measure.compare import order
from anyattn.core.measure.rules import RouteRule
from anyattn.core.measure.table import Timing
from anyattn.core.select.joint import Joint
from anyattn.core.select.options import Field, Option
from anyattn.core.select.pages import kernel_page
from anyattn.core.select.request import Request
from anyattn.core.select.stand_in import may_stand_in, on_pool

__all__ = ["members", "rules_of"]

Times = Mapping[str, Timing]


def members(field: Field, joint: Joint, request: Request) -> dict[str, Option]:
    """Who may take steps of a role: the decided backend first, then all on its pool, as ranked.

    Nobody but the decided one where it was chosen explicitly, and nobody who takes something away
    (`stand_in.may_stand_in`).
    """
    first = joint.of(field.role)
    assert first is not None
    found = {first.record.name: first}
    if request.route is None or field.choice is not None:
        return found
    for option in field.options:
        fits = kernel_page(option.row, joint.page, joint.layout) is not None
        if fits and may_stand_in(option, first, field.role):
            found.setdefault(option.record.name, option)
    return found


def rules_of(field: Field, joint: Joint, names: Sequence[str]) -> tuple[RouteRule, ...]:
    """A rule for each measured step that timed the first of `names` and another one.

    Times within the noise of the fastest keep the order of `names`.
    """
    steps: dict[tuple[str, int, int, int, int], list[Times]] = {}
    for bucket, times in on_pool(field.times.routable, joint.page, joint.layout):
        if names[0] in times:
            key = (bucket.run, *bucket.size)
            steps.setdefault(key, []).append({n: times[n] for n in names if n in times})
    found = []
    for (run, requests, kv_len, new, prompts), entries in steps.items():
        timed = [n for n in names if all(n in times for times in entries)]
        if len(timed) > 1:
            found.append(RouteRule(run, requests, kv_len, new, order(timed, entries)[0], prompts))
    return tuple(found)
