"""Eager decode steps in the place of earlier ones: a plan that nobody holds any more takes the next batch.

Making a plan is mostly allocating, so a few decode plans are remembered. One of them serves a batch of its
shape where memory that was given back would be handed out again, too: nothing but this list holds the plan,
its tables or its tensors (their views and other tensors on their memory included), and work goes to the
stream that the plan was made on. What is not counted, and so may change: `vars(plan)` without the plan, parts
of `plan.private` and `plan.uploaded`, which are the backend's own, and what refers weakly. It is the same
object that comes back, with any attribute that a caller has set on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.capturing import is_capturing
from anyattn.core.groups import Space
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.metadata.upload import UploadLayout
from anyattn.core.plan import Plan, TableKind
from anyattn.core.strategy import Strategy
from anyattn.core.streams import EventRecorder

__all__ = ["EagerPlans", "layout_of"]

_COUNT = 4
"""Plans kept: each has its workspace. A loop that makes a plan while it holds the last one uses two."""

_SEEN = (
    sys.implementation.name == "cpython"
    and getattr(sys, "_is_gil_enabled", lambda: True)()
    and hasattr(torch.Tensor, "_use_count")
    and hasattr(torch._C, "_storage_Use_Count")
    and hasattr(torch._C, "_len_torch_dispatch_stack")
)
"""Holders can be counted here: without that, no plan is kept."""


_Counts = tuple[list[int], list[int], list[int]]


class _Kept:
    """A plan, and how often each of its parts is referred to while nobody else holds one."""

    __slots__ = ("_counts", "_parts", "_storages", "_tensors", "fit", "inference", "plan", "stream")

    def __init__(self, plan: Plan, stream: int, fit: tuple[object, ...]) -> None:
        self.plan, self.stream, self.fit = plan, stream, fit
        self.inference = torch.is_inference_mode_enabled()
        self._tensors = list({id(each): each for each in _tensors(plan)}.values())
        memory = {each._cdata: each for each in (t.untyped_storage() for t in self._tensors)}
        self._storages = list(memory)
        self._parts: list[Any] = [plan.tables, plan.write_locs, plan.window_locs]
        self._parts += [*plan.tables.values(), *self._tensors, *memory.values()]
        if plan.private is not None:
            self._parts.append(plan.private)
        del memory
        self._counts: _Counts = self._counted()

    def _counted(self) -> _Counts:
        """Of Python, of what holds a tensor elsewhere (autograd), of memory that several tensors share."""
        return (
            list(map(sys.getrefcount, self._parts)),
            list(map(torch.Tensor._use_count, self._tensors)),  # type: ignore[attr-defined]
            list(map(torch._C._storage_Use_Count, self._storages)),  # type: ignore[attr-defined]
        )

    def is_held(self) -> bool:
        """Somebody else holds the plan itself: the one thing that is quickly seen."""
        return sys.getrefcount(self.plan) != _ALONE

    def is_free(self) -> bool:
        """Nobody else holds the plan or a part of it."""
        return not self.is_held() and self._counted() == self._counts


def _tensors(plan: Plan) -> Iterator[torch.Tensor]:
    """Every tensor of a plain decode plan, but for those of `private`, which is the backend's own."""
    yield from (plan.req_pool_indices, plan.seq_lens, plan.prefix_lens, plan.extend_lens)
    yield from (plan.query_offsets, plan.positions)
    if plan.listed_loc is not None:
        yield plan.listed_loc
    yield from plan.write_locs.values()
    yield from plan.window_locs.values()
    for table in plan.tables.values():
        found = (table.kv_start, table.kv_lens, table.block_table, table.indptr, table.indices)
        yield from (t for t in (*found, table.last_page_len) if t is not None)


def layout_of(plan: Plan) -> UploadLayout | None:
    """Where the vectors of later batches go; None for plans that a later batch couldn't be compiled into.

    Those are plans at fixed addresses, of other strategies and latent methods, with tables whose size follows
    from the lengths one by one, and those that took vectors which were on the device already.
    """
    plain = not plan.stable and plan.strategy is Strategy.PAGED and plan.mla_method is None
    for group, table in plan.tables.items():
        trimmed = group.window is not None and table.form.kind is not TableKind.REQUEST_TABLE
        plain = plain and group.space is not Space.ENCODER and not trimmed
    if not plain:
        return None
    batch = plan.batch
    fields = [
        ("req_pool_indices", plan.req_pool_indices),
        ("seq_lens", plan.seq_lens),
        ("extend_seq_lens", plan.extend_lens),
    ]
    if plan.listed_loc is not None:
        fields.append(("out_cache_loc", plan.listed_loc))
    if batch.positions is not None:
        fields.append(("positions", plan.positions))
    memory = plan.req_pool_indices.untyped_storage()
    places = []
    for name, vector in fields:
        if not getattr(batch, name).is_cpu or vector.untyped_storage()._cdata != memory._cdata:
            return None
        at = int(vector.storage_offset()) * vector.element_size()
        places.append((name, at, vector.shape[0], vector.dtype))
    region = torch.empty(0, dtype=torch.uint8, device=plan.req_pool_indices.device)
    return UploadLayout(region.set_(memory, 0, (memory.nbytes(),), (1,)), places)


class EagerPlans:
    """The decode plans of one backend that may be used again. Those of graphs are never among them."""

    def __init__(self, compiler: MetadataCompiler, *, usable: bool = True) -> None:
        """On devices whose streams aren't known here, and unless `usable`, nothing is kept."""
        self._compiler, self._plans = compiler, list[_Kept]()
        self._device = compiler.device
        on_cuda = self._device.type == "cuda"
        self._stream: Callable[[], int] = EventRecorder(self._device).handle if on_cuda else _one_stream
        """The current stream."""
        self._usable = usable and _SEEN and compiler.device.type in ("cpu", "cuda")

    def renewed(
        self,
        batch: ForwardBatch,
        check: Callable[[ForwardBatch], object],
        serves: Callable[[Plan, ForwardBatch], bool],
    ) -> Plan | None:
        """A kept plan with the batch's values in the same tensors, or None.

        `check` refuses what the backend can't run. `serves`: whether what it planned for a batch of the same
        shape is right for this one, too.

        Raises:
            BatchError: as `MetadataCompiler.prepare`; the plan stays kept.
        """
        if batch.forward_mode is not ForwardMode.DECODE or not self._plans or not self._open(batch):
            return None
        check(batch)
        kept = self._free(batch, serves)
        if kept is None:
            return None
        plan = kept.plan
        try:
            self._compiler.renew(plan, batch)
        finally:
            self._plans.append(kept)
        return plan

    def kept(self, plan: Plan) -> Plan:
        """The same plan, which was just made; remembered if later batches may be compiled in its place.

        Before any kernel or caller has seen it: whoever holds a part of it now is the plan itself.
        """
        if plan.key.mode is not ForwardMode.DECODE or not self._open(plan.batch):
            return plan
        layout, fit = layout_of(plan), self._compiler.fit(plan.batch)
        if layout is not None and fit is not None:
            plan.uploaded = layout
            if len(self._plans) >= _COUNT:
                del self._plans[0]
            self._plans.append(_Kept(plan, self._stream(), fit))
        return plan

    def _free(self, batch: ForwardBatch, serves: Callable[[Plan, ForwardBatch], bool]) -> _Kept | None:
        """Takes out a plan that nobody holds and that the batch fits, the last used before others: the next
        batch is most likely like the last.
        """
        stream, inference, fit = self._stream(), torch.is_inference_mode_enabled(), self._compiler.fit(batch)
        if fit is None:
            return None
        for kept in self._plans[::-1]:
            if not (kept.stream == stream and kept.inference is inference) or kept.is_held():
                continue
            if kept.fit != fit or not serves(kept.plan, batch):
                continue
            try:  # taken out before it is counted: another thread may plan at the same time
                self._plans.remove(kept)
            except ValueError:
                continue
            if kept.is_free():
                return kept
            self._plans.append(kept)
        return None

    def _open(self, batch: ForwardBatch) -> bool:
        """A plain batch, outside captures and of what looks into every operator (or makes fake tensors)."""
        return (
            self._usable
            and batch.mask is None
            and batch.encoder_lens is None
            and batch.encoder_out_cache_loc is None
            and batch.spec_info is None
            and torch._C._len_torch_dispatch_stack() == 0
            and not is_capturing(self._device)
        )


def _one_stream() -> int:
    """Of a CPU."""
    return 0


class _Holder:
    """Holds an object as `_Kept` does its plan."""

    __slots__ = ("plan",)

    def __init__(self, plan: Any) -> None:
        self.plan = plan


_holder = _Holder(object())
_ALONE = sys.getrefcount(_holder.plan) if _SEEN else 0
"""What is counted of an object that one attribute holds."""
