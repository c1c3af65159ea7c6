"""What the layers of a step pass to FlashAttention: arguments by plan group, from shapes and bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from anyattn.backends.cuda.flash_providers import FlashFunction, FlashLibrary
from anyattn.backends.cuda.flash_tree import TreeRows
from anyattn.backends.cuda.repeated import repeated
from anyattn.core.backend_config import BackendConfig
from anyattn.core.batch import ForwardMode
from anyattn.core.call import step_kind
from anyattn.core.capturing import is_capturing
from anyattn.core.dtypes import is_fp8
from anyattn.core.groups import PlanGroup
from anyattn.core.plan import Plan, Table
from anyattn.core.spec import AttentionKind
from anyattn.core.traits import Determinism

__all__ = ["FlashPlanner", "FlashStep", "GroupCall"]

_KEPT = 256  # shapes of decode steps whose calls are kept
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass(eq=False)
class GroupCall:
    """What every layer of a plan group passes in a step.

    Attributes:
        function, arguments: what is called, with its keyword arguments. table: None = keys are arguments.
        scheduler, schedule: the build's scheduler with its arguments, whose result holds for layers of the
            group's largest head count. plan: calls it. scheduled: `arguments` with its result, under the name
            `place`. settled: where results go once a graph has seen one.
        fresh: the same over k and v alone, for layers that pass them in a step without cached keys.
    """

    function: FlashFunction
    arguments: dict[str, Any]
    table: Table | None
    causal: bool
    scheduler: FlashFunction | None = None
    schedule: dict[str, Any] | None = None
    plan: Callable[[], torch.Tensor] | None = field(init=False, default=None)
    scheduled: dict[str, Any] = field(init=False)
    place: str = field(init=False, default="")
    settled: torch.Tensor | None = field(init=False, default=None)
    fresh: GroupCall | None = None

    def __post_init__(self) -> None:
        self.scheduled = self.arguments
        if self.scheduler is not None and self.schedule is not None:
            self.plan = repeated(self.scheduler.call, self.schedule)
            self.scheduled, self.place = self.arguments.copy(), self.function.names["metadata"]


@dataclass(frozen=True, eq=False)
class _DecodeCall:
    """The call of a group in every decode step of one shape, without the step's tensors.

    `places`, `schedule_places`: arguments that hold the block table (0), its lengths (1), query offsets (2).
    """

    function: FlashFunction
    arguments: dict[str, Any]
    causal: bool
    places: tuple[tuple[str, int], ...]
    scheduler: FlashFunction | None
    schedule: dict[str, Any] | None
    schedule_places: tuple[tuple[str, int], ...]

    @staticmethod
    def of(call: GroupCall, table: Table, offsets: torch.Tensor) -> _DecodeCall | None:
        """From the first step's; None if it holds tensors that aren't of the step."""
        tensors = (table.blocks, table.kv_lens, offsets)

        def places(given: dict[str, Any]) -> tuple[tuple[str, int], ...]:
            return tuple(
                (name, i) for name, value in given.items() for i, x in enumerate(tensors) if value is x
            )

        def without(given: dict[str, Any]) -> dict[str, Any]:
            return {name: None if isinstance(value, torch.Tensor) else value for name, value in given.items()}

        schedule = call.schedule or {}
        given = [x for x in (*call.arguments.values(), *schedule.values()) if isinstance(x, torch.Tensor)]
        own, planned = places(call.arguments), places(schedule)
        if len(given) != len(own) + len(planned):
            return None
        left = None if call.schedule is None else without(schedule)
        arguments = without(call.arguments)
        return _DecodeCall(call.function, arguments, call.causal, own, call.scheduler, left, planned)

    def over(self, table: Table, offsets: torch.Tensor) -> GroupCall:
        """The call of another step."""
        tensors = (table.blocks, table.kv_lens, offsets)
        arguments, schedule = self.arguments.copy(), self.schedule
        for name, i in self.places:
            arguments[name] = tensors[i]
        if schedule is not None:
            schedule = schedule.copy()
            for name, i in self.schedule_places:
                schedule[name] = tensors[i]
        return GroupCall(self.function, arguments, table, self.causal, self.scheduler, schedule)


@dataclass(eq=False)
class FlashStep:
    """`Plan.private`: the calls of a step, one for each plan group, in their order.

    `rows`: query rows that belong to requests, padded ones included, as far as the host knows; the kernels
    are given no more. `clear`: rows behind them are written by nobody and must be finite. `planned`: calls
    that have a schedule, with their numbers.
    """

    calls: list[GroupCall]
    rows: int
    clear: bool
    tree: TreeRows | None = None
    planned: list[tuple[int, GroupCall]] = field(init=False)

    def __post_init__(self) -> None:
        self.planned = [(i, call) for i, call in enumerate(self.calls) if call.plan is not None]


class FlashPlanner:
    """Makes a step's calls, and the schedule that all layers of a plan group share.

    Args:
        splits: parts that a request's keys are cut into, 0 = the library chooses.
    """

    def __init__(self, library: FlashLibrary, config: BackendConfig, splits: int) -> None:
        self.library, self.config, self.splits = library, config, splits
        exact = config.pool.kv_dtype == config.dtype
        latent = any(group.mla for group in config.groups.plan_groups)
        invariant = config.deterministic is Determinism.BATCH_INVARIANT
        self._may_skip_pool = exact and not (latent or invariant)
        self._key_dtype = config.pool.kv_dtype if is_fp8(config.pool.kv_dtype) else config.dtype
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        self._decodes: dict[tuple[int, int, int], _DecodeCall] = {}

    def step(self, plan: Plan, *, in_capture: bool) -> FlashStep:
        """Host half: arguments, from shapes and bounds."""
        decode, exact = plan.key.mode is ForwardMode.DECODE, plan.batch.exact
        groups = self.config.groups.plan_groups
        if decode and not in_capture and plan.mask_cells is None:
            calls = [self._decode(plan, index, group) for index, group in enumerate(groups)]
        else:
            calls = [self._call(plan, group, in_capture=in_capture) for group in groups]
        known = exact is not None and not (in_capture or decode)
        rows = int(exact.extend_lens.sum()) if known and exact is not None else plan.key.num_tokens
        return FlashStep(calls, rows, clear=in_capture and not decode)

    def longest_query(self, plan: Plan, in_capture: bool) -> int:
        """Query tokens that a request of this step can have; of any step that replays it, in a capture."""
        longest = plan.max_q_len
        if in_capture and plan.batch.exact is not None and plan.key.mode is not ForwardMode.DECODE:
            verifies = plan.key.mode is ForwardMode.TARGET_VERIFY
            drafts = self.config.limits.max_draft_tokens if verifies else plan.key.num_tokens
            longest = max(longest, min(drafts, plan.key.num_tokens))
        return max(1, longest)

    def _decode(self, plan: Plan, index: int, group: PlanGroup) -> GroupCall:
        """As `_call`. Of a decode step nothing but tensors changes while its shape stays."""
        table = plan.tables.get(group.table)
        if table is None:
            return self._call(plan, group, in_capture=False)
        key = (index, plan.key.num_requests, _widest(table))
        known = self._decodes.get(key)
        if known is not None:
            return known.over(table, plan.query_offsets)
        call = self._call(plan, group, in_capture=False)
        kept = _DecodeCall.of(call, table, plan.query_offsets)
        if kept is not None:
            if len(self._decodes) >= _KEPT:
                self._decodes.clear()
            self._decodes[key] = kept
        return call

    def _call(self, plan: Plan, group: PlanGroup, *, in_capture: bool) -> GroupCall:
        kind = step_kind(group.table.kind, plan.key.mode, plan.mask_cells is not None)
        causal = kind is AttentionKind.CAUSAL
        common: dict[str, Any] = {
            "cu_q": plan.query_offsets,
            "max_q": self.longest_query(plan, in_capture),
            "scale": group.scale,
            "causal": causal,
            "cap": group.logit_cap,
            "window": _window(group, causal),
            "splits": self.splits,
        }
        table = plan.tables.get(group.table)
        if table is None:
            return self._ragged(plan, common)
        function = self.library.paged
        if function.rectangular and plan.key.mode is ForwardMode.DECODE and not group.mla:
            # One query each: FA3 then runs without the kernel that lays out varying lengths.
            del common["cu_q"], common["max_q"]
        arguments = function.bind(
            table=table.blocks,
            used=table.kv_lens,
            max_k=_widest(table) if "implementation" in function.names else None,  # vLLM's has no default
            **common,
        )
        call = GroupCall(function, arguments, table, causal)
        masked = plan.mask_cells is not None and group.table.kind is not AttentionKind.CROSS
        if self.library.schedule is not None and not masked:
            schedule = self._schedule(plan, group, table, common, in_capture)
            call = GroupCall(function, arguments, table, causal, self.library.schedule, schedule)
        if self._is_fresh(plan, group) and not (masked or in_capture):
            call.fresh = self._ragged(plan, common)
        return call

    def _ragged(self, plan: Plan, common: dict[str, Any]) -> GroupCall:
        function = self.library.ragged
        arguments = function.bind(cu_k=plan.query_offsets, max_k=common["max_q"], **common)
        return GroupCall(function, arguments, None, common["causal"])

    def _is_fresh(self, plan: Plan, group: PlanGroup) -> bool:
        """k and v are all there is, and the same bits as in the pool: then nothing need be paged."""
        exact = plan.batch.exact
        if exact is None or plan.key.mode not in _EXTENDS or not self._may_skip_pool:
            return False
        own = group.table.kind is not AttentionKind.CROSS
        return own and torch.equal(exact.seq_lens, exact.extend_lens)

    def _schedule(
        self, plan: Plan, group: PlanGroup, table: Table, common: dict[str, Any], in_capture: bool
    ) -> dict[str, Any]:
        """As the layers will be called: the kernel takes the result on trust, bounds of splits included."""
        function = self.library.schedule
        assert function is not None
        bound = function.bind(
            heads_q=self.config.groups.max_q_heads[group],
            heads_kv=group.num_kv_heads,
            used=table.kv_lens,
            max_k=_widest(table),
            max_q=self.longest_query(plan, in_capture),
            **{name: common.get(name) for name in ("cu_q", "causal", "window", "splits")},
        )
        return bound | {
            "batch_size": plan.key.num_requests,
            "headdim": group.head_dim,
            "headdim_v": group.v_head_dim,
            "qkv_dtype": self._key_dtype,
            "page_size": table.form.kernel_page,
            "has_softcap": group.logit_cap is not None,
        }

    def fill(self, step: FlashStep, *, stable: bool) -> None:
        """Device half: the schedules. `stable`: at addresses that graphs may keep."""
        for index, call in step.planned:
            assert call.plan is not None
            made = call.plan()
            call.scheduled[call.place] = self._settled(index, call, made) if stable else made

    def _settled(self, index: int, call: GroupCall, made: torch.Tensor) -> torch.Tensor:
        """What was made, at the one address that graphs of this plan read.

        A graph that makes its schedule does so at the same place in every replay, and nothing else uses that
        place while the plan holds it: then it needs no copy. Outside of captures one is made into memory that
        steps share, by size: nothing of a larger one can stand behind a smaller.
        """
        place = call.settled
        if place is None and is_capturing(made.device):
            call.settled = made
            return made
        if place is None:
            place = self._held.get((index, made.shape[0]))
        if place is None:
            with torch.inference_mode(False):  # written to inside of it and outside
                place = self._held[index, made.shape[0]] = torch.empty_like(made)
        if not place.is_inference():
            return place.copy_(made)
        with torch.inference_mode():  # made by a capture in that mode, which forbids to write to it outside
            return place.copy_(made)


def _widest(table: Table) -> int:
    """Keys that a row of the table has room for: what the kernels bound a request by."""
    return table.blocks.shape[1] * table.form.kernel_page


def _window(group: PlanGroup, causal: bool) -> tuple[int, int] | None:
    """Keys left and right of a query's own that it sees: W keys with itself are W - 1 to its left."""
    size = group.table.window
    if size is None or group.table.kind is AttentionKind.CROSS:
        return None
    return size - 1, 0 if causal else size - 1
