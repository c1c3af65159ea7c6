"""One step of `flashinfer` planned: which wrapper runs which part for each slot, from host arrays alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from anyattn.backends.cuda.flashinfer_launch import Launch, repeats_launches
from anyattn.backends.cuda.flashinfer_lease import Lease, Role, WrapperKind, Wrappers
from anyattn.backends.cuda.flashinfer_native import DecodeAgain, DecodeSizes, Prepared, point_to
from anyattn.backends.cuda.flashinfer_plan import (
    HostArrays,
    KeptPages,
    accepts,
    listed_tokens,
    uses_tensor_cores,
    window_left,
)
from anyattn.backends.cuda.mirrored import Mirrored
from anyattn.core.batch import ForwardMode
from anyattn.core.call import step_kind
from anyattn.core.groups import PlanGroup, TableGroup
from anyattn.core.plan import Plan, Table
from anyattn.core.spec import AttentionKind
from anyattn.core.strategy import Strategy

__all__ = ["Runs", "Setup", "Step", "StepPlanner", "plan_again"]


class Runs(NamedTuple):
    """What a slot runs in a step: `keys` over a table (decode, paged, sinks), `own` over k and v, or both."""

    keys: Any = None
    own: Any = None


class Repeat(NamedTuple):
    """Decode wrappers to be planned again for the pages of a table, which they read already."""

    group: TableGroup
    table: Table
    pages: KeptPages
    wrappers: tuple[tuple[Any, Prepared], ...]


@dataclass(eq=False)
class Step:
    """`Plan.private`: wrappers by slot, masks to pack (table -> window, bits), the lease of this step.

    `captured`: wrappers of a captured step, in the order in which they are planned. `repeats`: every plan
    of a decode step, by table, where all can be made by native calls alone; `launches`: by slot, there.
    """

    runs: tuple[Runs, ...] = ()
    num_tokens: int = 0
    masks: dict[Table, tuple[int | None, torch.Tensor]] = field(default_factory=dict)
    lease: Lease | None = None
    captured: list[Any] = field(default_factory=list)
    repeats: tuple[Repeat, ...] = ()
    launches: tuple[Launch, ...] = ()


@dataclass(frozen=True, eq=False)
class Setup:
    """What a backend plans with. `inner`: kernel by mode; `slots`: plan groups, each at one head count."""

    slots: tuple[tuple[PlanGroup, int], ...]
    inner: Mapping[ForwardMode, str]
    wrappers: Wrappers
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    @cached_property
    def again(self) -> DecodeAgain:
        """Decode wrappers that needn't be planned from scratch."""
        return DecodeAgain(self.wrappers.version, self.wrappers.staging)

    @cached_property
    def repeats_launches(self) -> bool:
        """Kernels are launched without the library's Python."""
        return repeats_launches()

    @cached_property
    def options(self) -> tuple[dict[str, Any], ...]:
        """What every `plan` of a slot is given; never modified."""
        return tuple(
            {
                "window_left": window_left(group.table.window),
                "logits_soft_cap": group.logit_cap,
                "sm_scale": group.scale,
                "q_data_type": self.dtype,
            }
            for group, _ in self.slots
        )

    @cached_property
    def cores(self) -> tuple[bool, ...]:
        """By slot: decode runs on tensor cores."""
        return tuple(uses_tensor_cores(g, heads, self.dtype, self.kv_dtype) for g, heads in self.slots)

    def decode_kind(self, inner: str, index: int) -> WrapperKind:
        """The wrapper that a slot decodes with."""
        return WrapperKind(Role.DECODE, inner, self.cores[index])

    @cached_property
    def no_pages(self) -> torch.Tensor:
        """int32, on the device: nothing to copy."""
        return torch.empty(0, dtype=torch.int32, device=self.device)


def plan_again(setup: Setup, plan: Plan) -> bool:
    """Plan the decode wrappers that the step has; False where more has to be done, or may have to be."""
    step: Step = plan.private
    again = setup.again
    for group, table, pages, wrappers in step.repeats:
        pages.take(listed_tokens(plan, group, table))
        for wrapper, known in wrappers:
            again.plan(wrapper, known, pages)
    return bool(step.repeats)


class StepPlanner:
    """Plans one step of a backend, slot by slot."""

    def __init__(self, setup: Setup, plan: Plan, host: HostArrays, *, in_capture: bool) -> None:
        """Into `plan.private`: a new `Step`, or a captured one whose wrappers are planned again."""
        self._of, self._plan, self._host = setup, plan, host
        self._in_capture = in_capture
        self._mode = plan.key.mode
        self._inner = setup.inner[self._mode]
        self._step: Step = plan.private
        self._lease = Lease(setup.wrappers)
        self._again = iter(self._step.captured)
        self._repeats: dict[Table, list[tuple[Any, Prepared]]] = {}
        self._fixed = in_capture or bool(self._step.captured)

    def run(self) -> None:
        """Plan every slot."""
        step, slots = self._step, len(self._of.slots)
        step.runs = tuple(self.slot(index) for index in range(slots))
        step.lease = self._lease
        step.repeats = self._all_repeats()
        repeated = step.runs if step.repeats and self._of.repeats_launches else ()
        step.launches = tuple(Launch(each.keys) for each in repeated)

    def _all_repeats(self) -> tuple[Repeat, ...]:
        """Empty unless every slot's plan is one of them."""
        if sum(map(len, self._repeats.values())) != len(self._of.slots):
            return ()
        requests, tables = self._plan.key.num_requests, self._plan.tables
        groups = {table: group for group, table in tables.items()}
        return tuple(
            Repeat(groups[table], table, KeptPages(requests, table.form.kernel_page), tuple(wrappers))
            for table, wrappers in self._repeats.items()
        )

    def slot(self, index: int) -> Runs:
        """Plan the parts that this step's layers of a slot run."""
        group = self._of.slots[index][0]
        kind = step_kind(group.table.kind, self._mode, self._plan.mask_cells is not None)
        if kind is AttentionKind.ENCODER_ONLY:
            return Runs(own=self._ragged(index, causal=False))
        table = self._plan.tables.get(group.table)
        cross = kind is AttentionKind.CROSS
        if self._mode is ForwardMode.DECODE and not group.sinks:
            assert table is not None
            return Runs(keys=self._decode(index, table))
        strategy = Strategy.PAGED if cross else self._plan.strategy
        causal = kind is AttentionKind.CAUSAL
        own = None if strategy is Strategy.PAGED else self._ragged(index, causal=causal)
        if strategy is Strategy.RAGGED:
            return Runs(own=own)
        assert table is not None
        return Runs(self._paged(index, table, causal=causal and own is None), own)

    def _wrapper(self, kind: WrapperKind, index: int, table: Table | None) -> Any:
        """One on lease; in a capture, one of the plan's own, which its replays plan again."""
        if self._in_capture:
            wrapper = self._of.wrappers.capture(kind, index, self._plan, table)
            self._step.captured.append(wrapper)
            return wrapper
        known = next(self._again, None)
        return self._lease.take(kind, index) if known is None else known

    def _both(self, host: torch.Tensor, device: torch.Tensor | None) -> torch.Tensor:
        """A host array that needn't be uploaded: the device half computes it there. A captured wrapper has
        buffers of its own to copy it to."""
        if self._fixed or device is None:
            return host
        return Mirrored.of(host, device)

    def _pages(self, table: Table) -> torch.Tensor:
        """The table's page numbers. In a captured wrapper's buffer they are already: nothing to copy."""
        assert table.indices is not None
        return self._of.no_pages if self._fixed else table.indices

    def _decode(self, index: int, table: Table) -> Any:
        setup, shape = self._of, (index, self._plan.key.num_requests)
        wrapper = self._wrapper(setup.decode_kind(self._inner, index), index, table)
        group, again = setup.slots[index][0], setup.again
        known = again.prepared(wrapper, shape)
        if known is None:
            self._decode_anew(wrapper, index, table)
            known = again.prepared(wrapper, shape)
        else:
            pages = KeptPages(shape[1], table.form.kernel_page)
            pages.take(listed_tokens(self._plan, group.table, table))
            again.plan(wrapper, known, pages)
            if not self._fixed:
                point_to(wrapper, table)
        if known is not None:
            self._repeats.setdefault(table, []).append((wrapper, known))
        return wrapper

    def _decode_anew(self, wrapper: Any, index: int, table: Table) -> None:
        setup = self._of
        group, heads = setup.slots[index]
        pages = self._host.pages(group.table, table)
        setup.again.forget(wrapper)
        setup.wrappers.plan(
            wrapper, self._both(pages.indptr, table.indptr), self._pages(table),
            self._both(pages.last, table.last_page_len), heads, group.num_kv_heads, group.head_dim,
            table.form.kernel_page, **setup.options[index], kv_data_type=setup.kv_dtype,
            **_lens(wrapper, pages.lens),
        )  # fmt: skip
        sizes = self._sizes(index, table.form.kernel_page)
        setup.again.remember(wrapper, (index, self._plan.key.num_requests), sizes)

    def _sizes(self, index: int, page: int) -> DecodeSizes:
        setup = self._of
        group, heads = setup.slots[index]
        return DecodeSizes(
            cores=setup.cores[index], inner=self._inner, heads=(heads, group.num_kv_heads, page),
            dim=group.head_dim, window_left=window_left(group.table.window), cap=group.logit_cap or 0.0,
            dtypes=(setup.dtype, setup.kv_dtype),
        )  # fmt: skip

    def _paged(self, index: int, table: Table, *, causal: bool) -> Any:
        group, heads = self._of.slots[index]
        pages = self._host.pages(group.table, table)
        options = self._of.options[index]
        if self._plan.mask_cells is not None and group.table.kind is not AttentionKind.CROSS:
            # The bits hold the window: it counts positions, the kernel's would count columns.
            options = options | {
                "packed_custom_mask": self._mask(group, table, pages.lens),
                "window_left": -1,
            }
        wrapper = self._wrapper(self._paged_kind(group, options["window_left"]), index, table)
        self._of.wrappers.plan(
            wrapper, self._both(self._host.qo_indptr, self._plan.query_offsets),
            self._both(pages.indptr, table.indptr), self._pages(table),
            self._both(pages.last, table.last_page_len), heads, group.num_kv_heads, group.head_dim,
            table.form.kernel_page, head_dim_vo=group.v_head_dim, causal=causal, **options,
            kv_data_type=self._of.kv_dtype, **_lens(wrapper, pages.lens),
        )  # fmt: skip
        return wrapper

    def _ragged(self, index: int, *, causal: bool) -> Any:
        """Over k and v as given: in the model's dtype whatever the pool stores."""
        group, heads = self._of.slots[index]
        wrapper = self._wrapper(WrapperKind(Role.RAGGED, self._inner), index, None)
        offsets = self._both(self._host.qo_indptr, self._plan.query_offsets)
        self._of.wrappers.plan(
            wrapper, offsets, offsets, heads, group.num_kv_heads, group.head_dim,
            head_dim_vo=group.v_head_dim, causal=causal, **self._of.options[index],
            kv_data_type=self._of.dtype,
        )  # fmt: skip
        return wrapper

    def _paged_kind(self, group: PlanGroup, left: int) -> WrapperKind:
        if not group.sinks:
            return WrapperKind(Role.PAGED, self._inner)
        return WrapperKind(
            Role.SINKS, self._inner, head_dim=group.head_dim, v_head_dim=group.v_head_dim,
            dtype=self._of.dtype, window_left=left,
        )  # fmt: skip

    def _mask(self, group: PlanGroup, table: Table, lens: torch.Tensor) -> torch.Tensor:
        """Storage of a table's mask bits (`pack_mask`), filled by the device half."""
        known = self._step.masks.get(table)
        if known is None:
            cells = int(((self._host.qo_indptr[1:] - self._host.qo_indptr[:-1]) * lens).sum())
            bits = torch.empty(max(1, cells), dtype=torch.uint8, device=self._of.device)
            known = self._step.masks[table] = (group.table.window, bits)
        return known[1]


_takes_lens: dict[type, bool] = {}


def _lens(wrapper: Any, lens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Lengths on the host, where the installed `plan` takes them instead of working them out."""
    kind = type(wrapper)
    if kind not in _takes_lens:
        _takes_lens[kind] = accepts(kind.plan, "seq_lens")
    return {"seq_lens": lens} if _takes_lens[kind] else {}
