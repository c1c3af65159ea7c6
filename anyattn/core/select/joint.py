"""All phases at once: one pool page and one layout that the best pair of backends can share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from anyattn.core.capabilities import Phase
from anyattn.core.measure.bucket import Role
from anyattn.core.select.explain import SAME_BACKEND
from anyattn.core.select.options import Field, Option
from anyattn.core.select.pages import kernel_page, page_candidates, splits
from anyattn.core.select.rank import Rank
from anyattn.core.select.stand_in import faster

__all__ = ["Joint", "solve_joint"]

Fields = Mapping[Phase, Field]


@dataclass(frozen=True)
class Joint:
    """One pool, and who serves each phase on it; verify and draft may be nobody.

    `mixed`: whoever is measured to be faster in mixed steps than the backend of prefill; None = that one.
    """

    page: int
    layout: str
    prefill: Option
    decode: Option
    verify: Option | None
    draft: Option | None
    mixed: Option | None = None

    def of(self, phase: Phase | Role) -> Option | None:
        """The option of a phase or role."""
        option: Option | None = getattr(self, phase.value)
        return self.prefill if phase is Role.MIXED and option is None else option


def _pairs(fields: Fields) -> list[tuple[Option, Option]]:
    """(prefill, decode) in order: fewest degraded, then smallest sum of places, then the better decode.

    Decode breaks ties because it reads the whole pool at every step.
    """
    pairs = product(fields[Phase.PREFILL].options, fields[Phase.DECODE].options)
    return sorted(pairs, key=lambda p: (p[0].degraded + p[1].degraded, p[0].place + p[1].place, p[1].place))


def _follow(field: Field, roles: Sequence[tuple[str, Option]], page: int, layout: str) -> Option | None:
    """The option for verify or draft: a leading role's backend if it fits the pool, else the best.

    In verification, whoever is measured to be faster than that stands in for it, at its place.
    """
    leaders = {leader.record.name: role for role, leader in reversed(roles)}
    order = list(reversed(leaders))

    def place(option: Option) -> int:
        name = option.record.name
        return order.index(name) if name in order else len(order) + option.place

    fitting = [o for o in field.options if kernel_page(o.row, page, layout) is not None]
    best = min(fitting, key=lambda o: (o.degraded, place(o)), default=None)
    if best is None:
        return None
    rank, name = best.rank, best.record.name
    quicker = faster(field, best, fitting, page, layout) if name in leaders and not _named(roles) else None
    if quicker is not None:
        return replace(quicker, place=place(best))
    if name in leaders and rank.how in ("priority", "measured"):
        rank = Rank(name, "priority", f"{SAME_BACKEND}{leaders[name]}")
    return replace(best, rank=rank, place=place(best))


def _named(roles: Sequence[tuple[str, Option]]) -> bool:
    """Somebody named the backends of the leading roles: who follows them stays with them."""
    return any(leader.rank.how in ("explicit", "environment", "pinned") for _, leader in roles)


def _cost(option: Option | None) -> int:
    return 10_000 if option is None else 1_000 * option.degraded + option.place


def _pools(
    prefill: Option, decode: Option, pages: Sequence[int], layouts: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Pools that both can read, in order of preference."""
    for page, layout in product(pages, layouts):
        if all(kernel_page(option.row, page, layout) is not None for option in (prefill, decode)):
            yield page, layout


def solve_joint(
    fields: Fields,
    required: frozenset[Phase],
    *,
    platform: str,
    page_size: int | None = None,
    layout: str | None = None,
    mixed: Field | None = None,
) -> Joint | None:
    """The best pair that shares a pool, and the pool that suits all phases best; None if there is none.

    `required` phases must be served; the others may stay empty. An asked page or layout is the only one
    tried. Among the pools of a pair, the one where verify and draft fare best wins, then the one whose
    pages fewest kernels read in pieces, then the platform's usual order. `mixed`: prefill's backends by
    their times in mixed steps.
    """
    needed = [o.row for phase in required for o in fields[phase].options]
    for prefill, decode in _pairs(fields):
        layouts = [name for name in decode.row.layouts if layout is None or name == layout]
        pages = page_candidates([prefill.row, decode.row, *needed], platform, page_size)
        found = [_fill(fields, prefill, decode, *pool) for pool in _pools(prefill, decode, pages, layouts)]
        complete = [joint for joint in found if all(joint.of(phase) for phase in required)]
        if complete:
            return _with_mixed(min(complete, key=_pool_cost), mixed)
    return None


def _with_mixed(joint: Joint, field: Field | None) -> Joint:
    if field is None:
        return joint
    fitting = [o for o in field.options if kernel_page(o.row, joint.page, joint.layout) is not None]
    return replace(joint, mixed=faster(field, joint.prefill, fitting, joint.page, joint.layout))


def _fill(fields: Fields, prefill: Option, decode: Option, page: int, layout: str) -> Joint:
    """The pair on one pool, with verify and draft added."""
    roles = [("prefill", prefill), ("decode", decode)]
    verify = _follow(fields[Phase.VERIFY], roles, page, layout)
    draft = _follow(fields[Phase.DRAFT], roles[::-1], page, layout)
    return Joint(page, layout, prefill, decode, verify, draft)


def _pool_cost(joint: Joint) -> tuple[int, int]:
    followers = _cost(joint.verify) + _cost(joint.draft)
    return followers, sum(splits(o.row, joint.page, joint.layout) for o in (joint.prefill, joint.decode))
