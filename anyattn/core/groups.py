"""Groups: which layers share a table, and which share a plan.

A *table group* says which slots are read; a *plan group* says which kernel specialisation reads them.
One step compiles one table per table group and plans once per plan group, for its largest head count.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from anyattn.core.hashing import hashed_once
from anyattn.core.spec import AttentionKind, AttentionSpec

__all__ = ["CACHED_KINDS", "GroupSet", "PlanGroup", "Space", "TableGroup"]

CACHED_KINDS = (AttentionKind.CAUSAL, AttentionKind.BIDIRECTIONAL)
"""Kinds whose layers keep the decoder's KV: those that a window pool can hold."""


class Space(Enum):
    """The pool that slots point into.

    FULL: the slots that `req_to_token` lists. WINDOW: a pool of its own for the layers of one window size
    (`TableGroup.window` says which), reached from FULL slots by that pool's map. ENCODER: `encoder_to_token`.
    """

    FULL = "full"
    WINDOW = "window"
    ENCODER = "encoder"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call


@hashed_once
@dataclass(frozen=True)
class TableGroup:
    """Slots that one table lists. `window` W trims it to the keys that some query of the step can see."""

    space: Space = Space.FULL
    window: int | None = None
    kind: AttentionKind = AttentionKind.CAUSAL

    @staticmethod
    def of(spec: AttentionSpec) -> TableGroup:
        """The table group of a layer in a pool without separate window storage."""
        space = Space.ENCODER if spec.kind is AttentionKind.CROSS else Space.FULL
        return TableGroup(space, spec.sliding_window, spec.kind)


@hashed_once
@dataclass(frozen=True)
class PlanGroup:
    """Everything that a kernel bakes into its plan except the head count of queries."""

    table: TableGroup
    head_dim: int
    v_head_dim: int
    num_kv_heads: int
    scale: float
    logit_cap: float | None = None
    sinks: bool = False
    mla: bool = False

    @staticmethod
    def of(spec: AttentionSpec) -> PlanGroup:
        """The plan group of a layer, a function of its spec alone."""
        return PlanGroup(
            TableGroup.of(spec),
            spec.head_dim,
            spec.v_head_dim,
            spec.num_kv_heads,
            spec.scale,
            spec.logit_cap,
            spec.sinks,
            spec.mla is not None,
        )


@dataclass(frozen=True)
class GroupSet:
    """All groups of a model on one pool. `max_q_heads[g]` is the head count that group g is planned for.

    `windows`: window sizes whose layers have a pool of their own (`KVPool.full_to_window`).
    """

    plan_groups: tuple[PlanGroup, ...]
    max_q_heads: dict[PlanGroup, int]
    windows: frozenset[int] = frozenset()

    @staticmethod
    def from_specs(specs: Sequence[AttentionSpec], windows: Container[int] = ()) -> GroupSet:
        """Groups in the order in which layers first need them."""
        sizes = [s.sliding_window for s in specs if s.sliding_window is not None]
        apart = frozenset(w for w in sizes if w in windows)
        heads: dict[PlanGroup, int] = {}
        tables: dict[TableGroup, TableGroup] = {}
        for spec in specs:
            group = _in_space(PlanGroup.of(spec), apart)
            group = replace(group, table=tables.setdefault(group.table, group.table))
            heads[group] = max(heads.get(group, 0), spec.num_q_heads)
        return GroupSet(tuple(heads), heads, apart)

    def locate(self, group: PlanGroup) -> PlanGroup:
        """The group of a layer whose spec alone says `group`, with the space that it has in this pool: the
        object that plans are keyed by, since comparing two equal ones costs more than looking one up.
        """
        found = _in_space(group, self.windows)
        return self._own.get(found, found)

    @cached_property
    def _own(self) -> dict[PlanGroup, PlanGroup]:
        return {group: group for group in self.plan_groups}

    @property
    def table_groups(self) -> tuple[TableGroup, ...]:
        """Distinct tables, in first-use order."""
        return tuple(dict.fromkeys(g.table for g in self.plan_groups))


def _in_space(group: PlanGroup, windows: frozenset[int]) -> PlanGroup:
    table = group.table
    if table.kind not in CACHED_KINDS or table.window not in windows:
        return group
    return replace(group, table=replace(table, space=Space.WINDOW))
