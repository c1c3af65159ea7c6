"""One cell: who takes part is built, judged, and timed against each other in interleaved rounds."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant
from anyattn.bench.harness.candidate import Candidate, Work
from anyattn.bench.harness.measure import Settings, measure
from anyattn.bench.harness.report import Result
from anyattn.bench.harness.timers import CudaTimer, Timer, make_timer
from anyattn.bench.judge import bound_of, relative_error
from anyattn.bench.ours import backends_of, chosen
from anyattn.bench.peers import peers_of
from anyattn.bench.scene import Field, room_for

__all__ = [
    "DeviceLost",
    "Options",
    "Timed",
    "build_cell",
    "check_alive",
    "describe",
    "rates",
    "rates_of",
    "time_cell",
]

_POOLS = 4
"""Pools of different pages that a cell may need at once."""
_SLOW_SECONDS = 5.0
_SAMPLE_FACTOR = 4
"""Times `sample_seconds`: what one call on every copy may take together."""


class DeviceLost(RuntimeError):
    """A kernel broke the device's context: nothing more can run in this process."""


@dataclass(frozen=True)
class Options:
    """How cells are timed.

    Attributes:
        rounds: samples of each contender. sample_seconds: about how long one takes.
        only, skip: globs of names that take part, or don't. degraded: backends with a reservation, too.
        peers: libraries called directly take part. say: told what happens, a line at a time.
    """

    rounds: int = 5
    sample_seconds: float = 0.015
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    degraded: bool = False
    peers: bool = True
    say: Callable[[str], None] = lambda _: None

    def admits(self, name: str) -> bool:
        """By `only` and `skip`."""
        named = not self.only or any(fnmatchcase(name, glob) for glob in self.only)
        return named and not any(fnmatchcase(name, glob) for glob in self.skip)


@dataclass
class Timed:
    """A cell in one mode. `results`: (contender, samples, error against float32, page and layout)."""

    cell: Cell
    mode: str
    copies: int
    choice: str | None
    results: list[tuple[Contender, Result, float, tuple[int, str]]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def time_cell(cell: Cell, device: torch.device, options: Options) -> list[Timed]:
    """The cell in each of its modes.

    Raises:
        DeviceLost: stop here.
    """
    modes = [m for m in cell.modes if m == "eager" or device.type == "cuda"] or ["eager"]
    needed = _POOLS * cell.stored_bytes
    if needed > room_for(device):
        why = f"needs about {needed / 1e9:.1f} GB, {room_for(device) / 1e9:.1f} GB are free"
        return [Timed(cell, mode, 0, None, skipped=[("every contender", why)]) for mode in modes]
    contenders, skipped = _contenders(cell, device, options)
    field = Field(cell, device)
    entrants, more = _prepared(contenders, field, options)
    found = []
    for mode in modes:
        timed = Timed(cell, mode, field.copies, chosen(cell, device, mode), skipped=[*skipped, *more])
        _time(timed, [e for e in entrants if mode in e[0].modes], device, options)
        found.append(timed)
    del field, entrants
    _free(device)
    return found


def build_cell(cell: Cell, device: torch.device, options: Options) -> list[tuple[str, str]]:
    """Build and run everybody once, on one copy, for the kernels that this compiles; `[(name, why not)]`."""
    contenders, skipped = _contenders(cell, device, options)
    _, more = _prepared(contenders, Field(cell, device, 1), options)
    _free(device)
    return [*skipped, *more]


def _contenders(
    cell: Cell, device: torch.device, options: Options
) -> tuple[list[Contender], list[tuple[str, str]]]:
    found, skipped = backends_of(cell, device, degraded=options.degraded)
    if options.peers:
        found += peers_of(cell, device)
    return [c for c in found if options.admits(c.name)], [s for s in skipped if options.admits(s[0])]


def names_in(cell: Cell, device: torch.device, options: Options) -> set[str]:
    """Who would take part in the cell, or be skipped with a reason. Nothing is built."""
    found, skipped = _contenders(cell, device, options)
    return {contender.name for contender in found} | {name for name, _ in skipped}


Prepared = tuple[Contender, Entrant, float]


def _prepared(
    contenders: Sequence[Contender], field: Field, options: Options
) -> tuple[list[Prepared], list[tuple[str, str]]]:
    """Built, run once on every copy, and right; or why not."""
    found, skipped = [], []
    for contender in contenders:
        started = time.perf_counter()
        try:
            entrant = contender.prepare(field)
            error = relative_error(entrant.runs[0](), field.q, entrant.scene)
            entrant = _shortened(entrant, field.device, options)
        except Exception as failure:  # a library may raise anything, and the others still count
            skipped.append((contender.name, describe(failure)))
            check_alive(field.device, contender.name)
            continue
        if error > bound_of(field.cell):
            skipped.append(
                (contender.name, f"wrong: relative error {error:.1e}, allowed {bound_of(field.cell):.0e}")
            )
            continue
        found.append((contender, entrant, error))
        if time.perf_counter() - started > _SLOW_SECONDS:
            options.say(f"    {contender.name} took {time.perf_counter() - started:.0f} s to build")
    return found, skipped


def _shortened(entrant: Entrant, device: torch.device, options: Options) -> Entrant:
    """Every call run once; of slow ones only so many that a sample doesn't take for ever."""
    synchronize(device)
    started = time.perf_counter()
    entrant.runs[-1]()
    synchronize(device)
    seconds = time.perf_counter() - started
    wanted = max(2, math.ceil(_SAMPLE_FACTOR * options.sample_seconds / seconds))
    runs = entrant.runs[:wanted]
    for run in runs:
        run()
    synchronize(device)
    return replace(entrant, runs=runs)


def _time(timed: Timed, prepared: Sequence[Prepared], device: torch.device, options: Options) -> None:
    timer = make_timer(device, graph=timed.mode == "graph")
    work = timed.cell.work()
    ready: list[tuple[Prepared, Candidate]] = []
    for entry in prepared:
        candidate = Candidate(entry[0].name, entry[1].runs, work)
        why = _captured(timer, candidate, device)
        if why:
            timed.skipped.append((candidate.name, why))
        else:
            ready.append((entry, candidate))
    if not ready:
        return
    settings = Settings(
        rounds=options.rounds, warmup=1, sample_seconds=options.sample_seconds, graph=timed.mode == "graph",
        limits=False,
    )  # fmt: skip
    try:
        report = measure(timed.cell.name, [c for _, c in ready], device, settings, timer=timer)
    except Exception as failure:
        check_alive(device, timed.cell.name)
        timed.skipped += [(c.name, describe(failure)) for _, c in ready]
        return
    for (contender, entrant, error), candidate in ready:
        where = entrant.scene.page, str(entrant.scene.pool.layout)
        timed.results.append((contender, report.result(candidate.name), error, where))


def _captured(timer: Timer, candidate: Candidate, device: torch.device) -> str:
    """Capture ahead, so that whoever can't be captured doesn't end the round. Why not, or empty."""
    if not (isinstance(timer, CudaTimer) and timer.graph):
        return ""
    try:
        timer.prepare(candidate)
        timer.sample(candidate, 1)
    except Exception as failure:
        check_alive(device, candidate.name)
        return f"not under a graph: {describe(failure)}"
    return ""


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_alive(device: torch.device, who: str) -> None:
    """Raises `DeviceLost` if the device doesn't answer any more."""
    _free(device)
    try:
        synchronize(device)
        torch.zeros(1, device=device).add_(1)
        synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{who}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """One line, not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _free(device: torch.device) -> None:
    """Pools of the cell before, or of who failed, are garbage by now, in cycles."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a broken context says so later, too
            torch.cuda.empty_cache()


def rates(cell: Cell, result: Result, limits: dict[str, Any]) -> dict[str, float]:
    """As `rates_of`, of a result's median."""
    return rates_of(cell.work(), result.median, limits)


def rates_of(work: Work, seconds: float, limits: dict[str, Any]) -> dict[str, float]:
    """GB/s, TFLOP/s, and the part of what the machine's limits allow.

    The roof over a cell is the longer of its bytes at the read rate and its operations at a product's rate.
    """
    found = {"gb_s": work.bytes / seconds / 1e9, "tflop_s": work.flops / seconds / 1e12}
    if limits:
        least = max(work.bytes / limits["read_gb_s"] / 1e9, work.flops / limits["gemm_tflop_s"] / 1e12)
        found["of_limit"] = least / seconds
    return found
