"""One grid: every cell timed in the same run, then the ratios to the best peer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from anyattn.bench.harness import Candidate, Report, Settings, add_arguments, measure, settings_of
from benchmarks.attention.cells import Cell, Scene, copies_of
from benchmarks.attention.ours import layer_candidate

__all__ = ["run_grid"]


def run_grid(title: str, cells: Sequence[Cell], peers: Callable[[Scene], list[Candidate]]) -> None:
    """Parse the command line, time the chosen cells, print and write the results."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, rounds=7)
    parser.add_argument("--cells", help="numbers of the cells to run (default: all)")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    settings = settings_of(args, dtype=torch.bfloat16)
    chosen = range(len(cells)) if args.cells is None else [int(c) for c in args.cells.split(",")]
    rows, reports = [], []
    for index in chosen:
        report = _time_cell(cells[index], args.backend, [] if args.no_peers else [peers], device, settings)
        settings = dataclasses.replace(settings, limits=False)  # the machine's limits once a run
        reports.append(report)
        print(report.table(), flush=True)
        rows.append((str(cells[index]), *_against_best(report, args.backend)))
    print(f"\n{title}: {args.backend} against the best peer (above 1: faster)")
    ratios = [ratio for _, ratio, _ in rows if ratio is not None]
    for cell, ratio, peer in rows:
        print(f"  {cell:44} {'' if ratio is None else f'{ratio:.3f}'}  {peer}")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"  geometric mean {mean:.3f}, lowest {min(ratios):.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps([r.to_json() for r in reports], indent=1))


def _time_cell(
    cell: Cell, backend: str, peers: Sequence[Callable[[Scene], list[Candidate]]], device: torch.device,
    settings: Settings,
) -> Report:  # fmt: skip
    scene = Scene(cell, backend, device, copies_of(cell, device))
    candidates = [layer_candidate(backend, scene), *(c for make in peers for c in make(scene))]
    report = measure(str(cell), candidates, device, settings)
    del scene, candidates
    torch.cuda.empty_cache()
    return report


def _against_best(report: Report, backend: str) -> tuple[float | None, str]:
    """(our speed over the fastest peer's, its name)."""
    times = {r.name: r.median for r in report.results}
    ours = times.pop(backend)
    if not times:
        return None, ""
    best = min(times, key=lambda name: times[name])
    return times[best] / ours, best
