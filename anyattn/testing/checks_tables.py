"""The metadata of a step, entry by entry, against tables built from plain lists.

Checked are the backend's own form, and the page and token forms at every page size, compiled by the
backend's own compiler: what a form states (granularity, fill, last page, first position) must hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anyattn.core.contract import AttentionBackend
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, Table, TableForm, TableKind
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.core.wrappers.shape_router import ShapeRouter
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Subject

__all__ = ["tables"]


@dataclass(frozen=True)
class _Request:
    """What a table must say about one request: `first` listed position and the listed slots."""

    first: int
    slots: list[int]

    def entries(self, page: int) -> list[int]:
        """Slots (page 1) or page numbers."""
        return [slot // page for slot in self.slots[::page]]


def tables(subject: Subject, case: Case) -> Outcome:
    """All table forms of one step."""
    world = subject.world(case)
    step = build_step(world)
    serving: Any = world.backend
    if isinstance(serving, HybridBackend):
        serving = serving.child(step.batch.forward_mode)
    backend: AttentionBackend = serving.first if isinstance(serving, ShapeRouter) else serving
    faults: list[str] = []
    for form in _forms(backend.compiler.form, case.page_size):
        compiler: MetadataCompiler = copy.copy(backend.compiler)
        compiler.form = form
        plan = compiler.prepare(step.batch)
        compiler.fill(plan)
        faults += [
            f"{form.kind.value} of page {form.kernel_page}: {fault}" for fault in _wrong(step, plan, form)
        ]
        faults += _wrong_offsets(step, plan)
    return Outcome(faults=tuple(dict.fromkeys(faults)))


def _forms(own: TableForm, page: int) -> Iterator[TableForm]:
    yield own
    yield TableForm(TableKind.TOKEN_CSR, index_slack=3, fill=1)
    yield TableForm(TableKind.PAGE_CSR, kernel_page=page)
    yield TableForm(TableKind.BLOCK_TABLE, kernel_page=page, width_multiple=4)
    for smaller in (p for p in (2, 3) if page % p == 0 and p < page):
        yield TableForm(TableKind.BLOCK_TABLE, kernel_page=smaller, fill=7)


def _requests(step: Step, page: int) -> list[_Request]:
    """Every key that some query of the step sees, from the page that holds the first one."""
    case, found = step.world.case, []
    for request, facts in zip(
        step.requests, zip(case.prefix_lens, case.extend_lens, strict=True), strict=True
    ):
        prefix, _ = facts
        first = 0 if case.window is None else max(0, prefix - case.window + 1)
        first -= first % page
        found.append(_Request(first, list(request.slots)[first:]))
    return found


def _wrong(step: Step, plan: Plan, form: TableForm) -> Iterator[str]:
    (table,) = plan.tables.values()
    want = _requests(step, form.kernel_page)
    count = len(want)
    if table.kv_start[:count].tolist() != [r.first for r in want]:
        yield f"kv_start {table.kv_start[:count].tolist()}, not {[r.first for r in want]}"
    if table.kv_lens[:count].tolist() != [len(r.slots) for r in want]:
        yield f"kv_lens {table.kv_lens[:count].tolist()}, not {[len(r.slots) for r in want]}"
    if table.block_table is not None:
        yield from _wrong_blocks(table, want, form)
    elif table.indices is not None:
        yield from _wrong_csr(table, want, form)


def _wrong_blocks(table: Table, want: list[_Request], form: TableForm) -> Iterator[str]:
    width = table.blocks.shape[1]
    if width % form.width_multiple:
        yield f"width {width} is no multiple of {form.width_multiple}"
    for i, request in enumerate(want):
        entries = request.entries(form.kernel_page)
        row = table.blocks[i].tolist()
        if row[: len(entries)] != entries:
            yield f"request {i} lists pages {row[: len(entries)]}, not {entries}"
        if any(entry != form.fill for entry in row[len(entries) :]):
            yield f"request {i}: cells behind the last page aren't {form.fill}"


def _wrong_csr(table: Table, want: list[_Request], form: TableForm) -> Iterator[str]:
    indptr, indices = table.csr
    entries = [r.entries(form.kernel_page) for r in want]
    offsets = [0]
    for listed in entries:
        offsets.append(offsets[-1] + len(listed))
    flat = [entry for listed in entries for entry in listed]
    if indptr[: len(offsets)].tolist() != offsets:
        yield f"indptr {indptr[: len(offsets)].tolist()}, not {offsets}"
    if indices[: len(flat)].tolist() != flat:
        yield f"indices {indices[: len(flat)].tolist()}, not {flat}"
    if form.index_slack and indices[-form.index_slack :].tolist() != [form.fill] * form.index_slack:
        yield f"the slack behind the indices isn't {form.fill}"
    last = [len(r.slots) - max(0, len(e) - 1) * form.kernel_page for r, e in zip(want, entries, strict=True)]
    if table.last_page_len is not None and table.last_page_len[: len(last)].tolist() != last:
        yield f"last_page_len {table.last_page_len[: len(last)].tolist()}, not {last}"


def _wrong_offsets(step: Step, plan: Plan) -> Iterator[str]:
    case = step.world.case
    offsets, positions = [0], list[int]()
    for prefix, new in zip(case.prefix_lens, case.extend_lens, strict=True):
        offsets.append(offsets[-1] + new)
        positions += range(prefix, prefix + new)
    if plan.query_offsets[: len(offsets)].tolist() != offsets:
        yield f"query offsets {plan.query_offsets[: len(offsets)].tolist()}, not {offsets}"
    if plan.positions[: len(positions)].tolist() != positions:
        yield f"positions {plan.positions[: len(positions)].tolist()}, not {positions}"
    if plan.prefix_lens[: case.batch_size].tolist() != list(case.prefix_lens):
        yield f"prefix lengths {plan.prefix_lens[: case.batch_size].tolist()}, not {list(case.prefix_lens)}"
