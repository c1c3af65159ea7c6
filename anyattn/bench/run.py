"""A run over cells: a budget of minutes, the result saved after each, limits measured before and after."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.document import add, limits_json, new_document, save, skipped_cell
from anyattn.bench.engine import DeviceLost, Options, check_alive, describe, rates_of, time_cell
from anyattn.bench.harness.limits import measure_limits

__all__ = ["Budget", "run_cells", "to_stderr"]


@dataclass(frozen=True)
class Budget:
    """Seconds from `started` on, on the clock of `time.monotonic`; None = as long as it takes."""

    started: float
    seconds: float | None = None

    @staticmethod
    def of_minutes(minutes: float | None) -> Budget:
        """From now on."""
        return Budget(time.monotonic(), None if minutes is None else 60 * minutes)

    @property
    def left(self) -> float:
        """Seconds; infinite without a bound."""
        if self.seconds is None:
            return float("inf")
        return self.seconds - (time.monotonic() - self.started)


def run_cells(
    cells: Sequence[Cell],
    device: torch.device,
    options: Options,
    *,
    budget: Budget | None = None,
    path: str | Path | None = None,
    document: dict[str, Any] | None = None,
    commit: str | None = None,
    show: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Time the cells in their order, and give the result.

    Args:
        budget: cells that would begin after it are left out, and listed.
        path: where the result is saved after every cell. document: an unfinished result to go on with.
        show: told each entry of the result.

    Raises:
        DeviceLost: the device broke; what was measured until then is saved, and the cell is marked.
    """
    budget = budget or Budget.of_minutes(None)
    found = document or new_document(device, commit)
    found["left_out"] = []
    done = {(entry["cell"]["name"], entry["mode"]) for entry in found["cells"]}
    _limits(found, device, cells, options)
    with torch.no_grad():
        for number, cell in enumerate(cells, 1):
            missing = tuple(mode for mode in cell.modes if (cell.name, mode) not in done)
            if not missing:
                continue
            if budget.left <= 0:
                found["left_out"].append(cell.name)
                continue
            options.say(f"[{number}/{len(cells)}] {cell.name}")
            first = len(found["cells"])
            cell = replace(cell, modes=missing)
            try:
                _one(found, cell, device, options)
            except DeviceLost as lost:
                skipped_cell(found, cell, f"the device failed: {lost}")
                raise
            finally:
                _saved(found, path)
            for entry in found["cells"][first:]:
                show(entry)
    if budget.left > 0:
        _limits(found, device, cells, options)
    _saved(found, path)
    return found


def _one(found: dict[str, Any], cell: Cell, device: torch.device, options: Options) -> None:
    started = time.monotonic()
    try:
        for timed in time_cell(cell, device, options):
            add(found, timed)
    except DeviceLost:
        raise
    except Exception as failure:  # of the scene itself: the next cell is another one
        check_alive(device, cell.name)
        skipped_cell(found, cell, describe(failure))
    options.say(f"    {time.monotonic() - started:.1f} s")


def _limits(found: dict[str, Any], device: torch.device, cells: Sequence[Cell], options: Options) -> None:
    """The best of what was measured before and after; fractions of results that are there follow."""
    kinds = {cell.torch_dtype for cell in cells} or {torch.float32}
    dtype = torch.bfloat16 if device.type == "cuda" else sorted(kinds, key=str)[-1]
    options.say(f"limits: copy, read, {str(dtype).removeprefix('torch.')} product")
    new = limits_json(measure_limits(device, dtype))
    old = found["limits"]
    for name in ("copy_gb_s", "read_gb_s", "gemm_tflop_s"):
        new[name] = max(new[name], old.get(name, 0.0))
    found["limits"] = new
    for entry in found["cells"]:
        work = Cell.from_json(entry["cell"]).work()
        for result in entry["results"]:
            result |= rates_of(work, result["median_s"], new)


def _saved(found: dict[str, Any], path: str | Path | None) -> None:
    if path is not None:
        save(found, path)


def to_stderr(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)
