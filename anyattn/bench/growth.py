"""What preparing a decode step costs as the batch and the context grow: host and device time, slopes.

Two things are measured. *Forms*: the compiler alone, one table in each form, filled by its general code.
*Backends*: `init_forward_metadata` as a step calls it, with the family's own planning. Host time is what
passes until the call returns, on an idle device; device time is that of the recorded half (`…_in_graph`),
replayed as a graph. On a CPU nothing runs behind the call's back: host is the first half, device the second.

Batches grow at 2,048 tokens of context, contexts at 8 requests. Slots of different requests coincide, which
no table minds. A slope is the least-squares line over the sizes, the intercept included.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.bench.document import new_document
from anyattn.bench.engine import Options, describe, synchronize
from anyattn.bench.run import to_stderr
from anyattn.core.capabilities import Phase
from anyattn.core.groups import GroupSet
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.select.decision import Accepted, Degraded

__all__ = ["BATCHES", "CONTEXTS", "SCHEMA", "Line", "measure_growth", "text"]

SCHEMA = "anyattn.growth/1"
BATCHES = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
_AT_CONTEXT, _AT_BATCH = 2048, 8
_PAGE, _PAGES = 16, 1024
_SPEC = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
_FORMS = {
    "request_table": TableForm(TableKind.REQUEST_TABLE),
    "token_csr": TableForm(TableKind.TOKEN_CSR),
    "page_csr": TableForm(TableKind.PAGE_CSR, kernel_page=_PAGE),
    "block_table": TableForm(TableKind.BLOCK_TABLE, kernel_page=_PAGE),
}
_STEPS = 4
"""Different steps that take turns: nothing may be kept from one to the next."""


@dataclass(frozen=True)
class Line:
    """us = `base` + `slope` x size."""

    base: float
    slope: float

    @staticmethod
    def through(sizes: Sequence[int], values: Sequence[float]) -> Line:
        """Least squares."""
        slope, base = statistics.linear_regression(sizes, values)
        return Line(base, slope)


@dataclass(frozen=True)
class _Step:
    """`host(number)` prepares one of the steps; `device()` is its second half, of a plan that is there."""

    host: Callable[[int], object]
    device: Callable[[], object]


Maker = Callable[["_World"], _Step]


class _World:
    """A pool, a table of `batch` requests of `context` tokens, and decode steps of different lengths."""

    def __init__(self, batch: int, context: int, device: torch.device, backend: str | None) -> None:
        self.device = device
        limits = anyattn.Limits(batch, batch, context)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.decision = anyattn.select(
            _SPEC, dtype=dtype, device=device, limits=limits, page_size=_PAGE, backend=backend
        )  # fmt: skip
        self.pool: Any = anyattn.kv.create_pool(self.decision, num_slots=_PAGE * _PAGES)
        self.table = anyattn.kv.RequestTable(max_requests=batch, max_context=context, device=device)
        pages = torch.randint(1, _PAGES, (batch, -(-context // _PAGE)), device=device)
        slots = pages[:, :, None] * _PAGE + torch.arange(_PAGE, device=device)
        self.table.req_to_token[:batch] = slots.view(batch, -1)[:, :context].int()
        self.batches = [self._batch(batch, context, step) for step in range(_STEPS)]

    def _batch(self, batch: int, context: int, step: int) -> anyattn.ForwardBatch:
        rows = torch.arange(batch)
        lens = torch.full((batch,), context - step)
        given = [rows, lens, _PAGE + rows % (_PAGE * (_PAGES - 1))]
        if self.device.type == "cuda":
            given = [x.pin_memory() for x in given]
        return anyattn.ForwardBatch.decode(*given)


def _form(form: TableForm, world: _World) -> _Step:
    compiler = MetadataCompiler(GroupSet.from_specs([_SPEC]), form, world.pool, world.table, owner=0)
    plans: list[Plan] = []

    def prepare(number: int) -> None:
        plan = compiler.prepare(world.batches[number])
        if world.device.type == "cuda":
            compiler.fill(plan)
        plans[:] = [plan]

    prepare(0)
    first = plans[0]  # a graph keeps its addresses
    return _Step(prepare, lambda: compiler.fill(first))


def _backend(world: _World) -> _Step:
    built: Any = anyattn.create_backend(world.decision, world.pool, world.table)
    backend = built.decode if hasattr(built, "decode") else built
    plans: list[Plan] = []

    def prepare(number: int) -> None:
        batch = world.batches[number]
        if world.device.type == "cuda":
            plans[:] = [backend.init_forward_metadata(batch)]
        else:
            plans[:] = [backend.init_forward_metadata_out_graph(batch)]

    prepare(0)
    first = plans[0]
    return _Step(prepare, lambda: backend.init_forward_metadata_in_graph(first))


def measure_growth(
    device: torch.device,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = 15,
) -> dict[str, Any]:
    """Every form and every usable backend that `only` and `skip` (globs) admit, as JSON; see the module."""
    asked = Options(only=tuple(only), skip=tuple(skip))
    document = new_document(device) | {"schema": SCHEMA, "batches": list(batches), "contexts": list(contexts)}
    for name in ("cells", "left_out", "limits"):
        del document[name]
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for kind, name, backend, make in _subjects(device):
        if not asked.admits(name):
            continue
        to_stderr(f"{kind} {name}")
        try:
            rows.append(
                {"kind": kind, "name": name} | _sweeps(make, backend, device, batches, contexts, rounds)
            )
        except Exception as failure:  # a library's planner may raise anything
            skipped.append({"name": name, "why": describe(failure)})
        gc.collect()
    return document | {"rows": rows, "skipped": skipped}


def _subjects(device: torch.device) -> list[tuple[str, str, str | None, Maker]]:
    def of_form(form: TableForm) -> Maker:
        return lambda world: _form(form, world)

    found: list[tuple[str, str, str | None, Maker]] = [
        ("form", name, None, of_form(form)) for name, form in _FORMS.items()
    ]
    world = _World(1, _PAGE, device, None)
    for candidate in world.decision.candidates:
        good = isinstance(candidate.verdict, Accepted | Degraded)
        if candidate.phase is Phase.DECODE and good and candidate.built:
            found.append(("backend", candidate.backend, candidate.backend, _backend))
    return found


def _sweeps(
    make: Maker,
    backend: str | None,
    device: torch.device,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    sizes = {"batch": [(b, _AT_CONTEXT) for b in batches], "context": [(_AT_BATCH, c) for c in contexts]}
    found: dict[str, Any] = {}
    for index, (axis, pairs) in enumerate(sizes.items()):
        times = [_timed(make(_World(*pair, device, backend)), device, rounds) for pair in pairs]
        along = [pair[index] for pair in pairs]
        for column, which in enumerate(("host", "device")):
            values = [pair[column] for pair in times]
            line = Line.through(along, values)
            found[f"{which}_by_{axis}"] = {"us": values, "base_us": line.base, "slope_us": line.slope}
    return found


def _timed(step: _Step, device: torch.device, rounds: int) -> tuple[float, float]:
    """`(host us, device us)`, medians."""
    host, fills = [], []
    replay = _recorded(step, device)
    for turn in range(rounds + 2):
        synchronize(device)
        gc.disable()
        started = time.perf_counter()
        step.host(turn % _STEPS)
        host.append((time.perf_counter() - started) * 1e6)
        gc.enable()
        fills.append(replay())
    return statistics.median(host[2:]), statistics.median(fills[2:])


def _recorded(step: _Step, device: torch.device) -> Callable[[], float]:
    """us of the second half: a graph's replays on a GPU."""
    if device.type != "cuda":

        def call() -> float:
            started = time.perf_counter()
            step.device()
            return (time.perf_counter() - started) * 1e6

        return call
    step.device()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.device()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) * 1e2

    return replay


_COLUMNS = ("at B 1", "at the most", "a request", "at 1k", "at the most", "a 1k ctx")
_WIDTHS = (10, 13, 11, 10, 13, 11)


def text(found: dict[str, Any]) -> str:
    """Two tables, host and device: us at the smallest and the largest size, and the slope between."""
    batches, contexts = found["batches"], found["contexts"]
    lines = [
        f"{found['device']} ({found['arch']}), torch {found['versions']['torch']}, {found['date']}",
        f"Preparing a decode step, us: B {batches[0]} to {batches[-1]:,} at {_AT_CONTEXT:,} tokens, contexts "
        f"{contexts[0]:,} to {contexts[-1]:,} at B {_AT_BATCH}",
    ]
    for which in ("host", "device"):
        columns = zip(_COLUMNS, _WIDTHS, strict=True)
        lines += ["", which.ljust(24) + "".join(name.rjust(width) for name, width in columns)]
        lines += [_row(row, which) for row in found["rows"]]
    lines += [f"  - {skipped['name']}: {skipped['why']}" for skipped in found["skipped"]]
    return "\n".join(lines)


def _row(row: dict[str, Any], which: str) -> str:
    cells = f"{row['kind']} {row['name']}".ljust(24)
    for axis, unit in (("batch", 1), ("context", 1024)):
        line = row[f"{which}_by_{axis}"]
        cells += f"{line['us'][0]:>10.1f}{line['us'][-1]:>13.1f}{unit * line['slope_us']:>11.3f}"
    return cells
