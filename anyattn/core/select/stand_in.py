"""Who may take steps of a role in the place of the backend that was decided, and who is measured faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyattn.core.capabilities import Feature
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.compare import compare, order
from anyattn.core.select.measured import Entry
from anyattn.core.select.options import Field, Option
from anyattn.core.select.rank import Rank, told

__all__ = ["faster", "may_stand_in", "on_pool"]

FOLLOWERS = (Role.MIXED, Role.VERIFY)
"""Roles that follow a phase's backend until one of their own is measured to be faster."""

_RECORDED = (Role.DECODE, Role.VERIFY)
_DRAFTS = frozenset({Feature.EXPLICIT_MASK, Feature.TREE_VERIFY, Feature.RAGGED_VERIFY})


def may_stand_in(option: Option, first: Option, role: Role) -> bool:
    """The option takes nothing away that `first` gives: it isn't second-rate beside it.

    In decode and verification it has graphs, and verifies every kind of draft, where `first` does.
    """
    recorded = role not in _RECORDED or bool(option.row.graph) >= bool(first.row.graph)
    drafts = _DRAFTS & frozenset(first.row.features) if role is Role.VERIFY else frozenset()
    return recorded and drafts <= frozenset(option.row.features) and option.degraded <= first.degraded


def on_pool(entries: Iterable[Entry], page: int, layout: str) -> Sequence[Entry]:
    """Those measured on the page and layout of a pool, where there are any."""
    found = list(entries)
    for name, value in (("page", page), ("layout", layout)):
        found = [entry for entry in found if getattr(entry[0], name) == value] or found
    return found


def faster(field: Field, leader: Option, fitting: Sequence[Option], page: int, layout: str) -> Option | None:
    """Of those that fit the pool, who is faster than the leader in the field's own role, beyond the noise.

    None in roles that follow nobody, for a field whose backend somebody named, and without times.
    """
    if field.role not in FOLLOWERS or field.choice is not None:
        return None
    own = on_pool([e for e in field.times.entries if e[0].role is field.role], page, layout)
    times = [each for _, each in own]
    able = {o.record.name: o for o in reversed(fitting) if may_stand_in(o, leader, field.role)}
    name = leader.record.name
    ahead = [n for n in reversed(able) if (seen := compare(n, name, times)) is not None and seen.faster]
    if not ahead:
        return None
    best = able[order(ahead, times)[0]]
    seen = compare(best.record.name, name, times)
    assert seen is not None
    evidence = told(seen, name, field.times)
    return Option(best.record, best.row, best.verdict, Rank(best.record.name, "measured", evidence), 0)
