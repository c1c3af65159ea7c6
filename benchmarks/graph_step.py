"""A decode step under a graph: preparation and 32 attention layers with their KV writes, in steady state.

    python -m benchmarks.graph_step --backends triton,flashinfer,fa3 --quick --json out.json
    python -m benchmarks.graph_step --backends flashmla --mla --quick
    TRITON_INTERPRET=1 python -m benchmarks.graph_step --device cpu --cells 2x40 --layers 2   # smoke test

Three loops take turns on one pool, on lengths that grow by a token a step:

step    anyattn: `GraphRunner.replay(batch)`
bare    the same kernels, KV write and merge included, in a graph without preparation, back to back
direct  the library's own API with its own recipe for graphs (`benchmarks/direct/graphed.py`)

Times of a step are CUDA events around many steps, behind one that isn't timed. Host time is what
`replay(batch)` takes right behind another one, while the device is busy: a scheduler's usual step. Behind a
wait for the device the same call finds cold caches and costs several times as much, as the direct loop does;
that is told beside it. Launches and copies are counted in torch's profiler at the end. Limits are judged on a
GPU alone; exit code 1 beyond one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import anyattn
from anyattn.bench.harness.command import output_file
from anyattn.bench.harness.report import device_name, versions
from anyattn.command_line import argument, count, one_line_errors
from anyattn.core.context import current_context, forward_context
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.errors import AnyattnError
from benchmarks.direct import NoRecipe, Shape, Stage
from benchmarks.direct.command import add_shape, offer_interpreter, shape_of
from benchmarks.direct.graphed import GRAPHED, Loop, Steps, graphs_of
from benchmarks.direct.launches import count_launches
from benchmarks.graph_cells import FULL, LIMITS, QUICK, STEPS, Cell, Measured, table

__all__ = ["Ours", "check_alike", "main", "measure_cell"]


_ROW = 4
"""Calls in a row whose host time is taken."""


class Ours:
    """The step through `GraphRunner`, and its bare kernels."""

    def __init__(self, stage: Stage, steps: Steps, platform: GraphPlatform, layers: int) -> None:
        self.stage, self.steps, self.layers = stage, steps, layers
        requests, spec = stage.shape.requests, stage.layers[0].spec
        self.output = stage.q.new_empty(requests, spec.num_q_heads, spec.v_head_dim)
        self.runner = GraphRunner(
            stage.backend, self._body, platform, buckets=Buckets([requests]),
            limits=anyattn.Limits(requests, requests, stage.table.max_context),
        )  # fmt: skip
        self.runner.capture()
        self.step(0)
        entry = self.runner.entry(steps.batches[0])
        self.replay = entry.graph.replay
        graph = platform.new_graph()

        def run() -> None:
            with forward_context(stage.backend, entry.plan):
                self._body(entry.plan.batch)

        graph.capture(run)
        self.bare = graph.replay

    def _body(self, batch: anyattn.ForwardBatch) -> torch.Tensor:
        stage, batch = self.stage, current_context().plan.batch  # which the plan stands for by now
        for number in range(self.layers):
            layer = stage.layers[number % len(stage.layers)]
            last = number == self.layers - 1  # the step's output stays where it is, as a model's would
            layer(stage.q, stage.k, stage.v, batch, out=self.output if last else None)
        return self.output

    def step(self, number: int) -> None:
        """One step; its last layer's output is in `output`."""
        self.runner.replay(self.steps.batches[number])


def _timed(call: Callable[[int], object], numbers: Sequence[int], device: torch.device) -> float:
    """us of all calls together, in steady state: one that isn't timed runs before them."""
    call(numbers[0])
    gc.disable()
    try:
        if device.type != "cuda":
            started = time.perf_counter()
            for number in numbers:
                call(number)
            return (time.perf_counter() - started) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for number in numbers:
            call(number)
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) * 1e3
    finally:
        gc.enable()


def _sample(call: Callable[[int], object], device: torch.device) -> float:
    """us a step over all steps."""
    return _timed(call, range(STEPS), device) / STEPS


def _bare_sample(ours: Ours, device: torch.device) -> float:
    """us of the bare kernels, at four lengths that are spread like those of the steps."""
    total, numbers, replays = 0.0, range(0, STEPS, 5), max(1, STEPS // 4)
    for number in numbers:
        ours.step(number)  # leaves its tables and lengths where the kernels read them
        total += _timed(lambda _: ours.bare(), range(replays), device)
    return total / (len(numbers) * replays)


def _hosts(
    calls: Mapping[str, Callable[[int], object]], device: torch.device
) -> dict[str, tuple[float, float]]:
    """us until a call returns, medians by name: of the third and fourth of four in a row, and of the first,
    which finds an idle device and cold caches, as the second still does in part. No more in a row: staging
    buffers would be waited for. All take turns, since hosts change their speed for seconds.
    """
    taken = {name: [list[float]() for _ in range(_ROW)] for name in calls}
    gc.disable()
    try:
        for number in range(STEPS):
            for name, call in calls.items():
                _one_row(call, taken[name], number, device)
    finally:
        gc.enable()
    return {
        name: (statistics.median(turns[-2] + turns[-1]), statistics.median(turns[0]))
        for name, turns in taken.items()
    }


def _one_row(
    call: Callable[[int], object], turns: Sequence[list[float]], number: int, device: torch.device
) -> None:
    """us of each of some calls behind a wait for the device, from step `number` on, into `turns`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for place, taken in enumerate(turns):
        started = time.perf_counter()
        call((number + place) % STEPS)
        taken.append((time.perf_counter() - started) * 1e6)


def check_alike(ours: Ours, direct: Loop) -> None:
    """Both loops compute the same in every step. Raises `AssertionError`."""
    for number in (0, STEPS - 1, STEPS // 2):
        ours.step(number)
        want = ours.output.float().clone()
        direct.step(number)
        got = direct.output().float().reshape(want.shape)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def measure_cell(
    backend: str,
    cell: Cell,
    base: Shape,
    device: torch.device,
    *,
    rounds: int = 7,
    host: str | None = None,
    platform: GraphPlatform | None = None,
) -> Measured:
    """Measure one backend; `base`: layers of a step, heads, dtype. `host`, `platform`: for emulations.

    Raises:
        AnyattnError: it doesn't serve, or has no graphs. AssertionError: the two compute different things.
    """
    stage, ours, direct = _built(backend, cell, base, device, host, platform or graphs_of(device))
    if isinstance(direct, Loop):
        check_alike(ours, direct)
    times: dict[str, list[float]] = {"step": [], "bare": [], "direct": []}
    samplers: list[tuple[str, Callable[[], float]]] = [
        ("step", lambda: _sample(ours.step, device)),
        ("bare", lambda: _bare_sample(ours, device)),
    ]
    if isinstance(direct, Loop):
        samplers.append(("direct", lambda: _sample(direct.step, device)))
    for turn in range(rounds + 1):
        first = turn % len(samplers)
        for name, sampler in [*samplers[first:], *samplers[:first]]:
            times[name].append(sampler())
    calls: dict[str, Callable[[int], object]] = {"ours": ours.step, "launch": lambda _: ours.replay()}
    if isinstance(direct, Loop):
        calls["direct"] = direct.step
    hosts = _hosts(calls, device)
    step, bare, other = (values[1:] for values in times.values())  # the first round warms up
    return Measured(
        backend=backend,
        method=stage.decision.decode.method,
        requests=cell.requests,
        context=cell.context,
        layers=stage.shape.layers,
        step_us=statistics.median(step),
        bare_us=statistics.median(bare),
        over_bare=statistics.median(a / b for a, b in zip(step, bare, strict=True)),
        host_us=hosts["ours"][0],
        host_cold_us=hosts["ours"][1],
        launch_us=hosts["launch"][0],
        direct=direct.name if isinstance(direct, Loop) else None,
        direct_us=statistics.median(other) if other else None,
        direct_host_us=hosts["direct"][0] if isinstance(direct, Loop) else None,
        over_direct=statistics.median(a / b for a, b in zip(step, other, strict=True)) if other else None,
        replays=rounds * STEPS,
        judged=device.type == "cuda",
    )


def _built(
    backend: str, cell: Cell, base: Shape, device: torch.device, host: str | None, platform: GraphPlatform
) -> tuple[Stage, Ours, Loop | None]:
    stage = Stage(backend, cell.shape(base), device, host=host)
    steps = Steps(stage, cell.context, STEPS)
    ours = Ours(stage, steps, platform, base.layers)
    if backend not in GRAPHED:
        return stage, ours, None
    try:
        return stage, ours, GRAPHED[backend](stage, steps, platform, base.layers)
    except NoRecipe as reason:
        print(f"     {backend}: no direct loop: {reason}", file=sys.stderr, flush=True)
        return stage, ours, None


def launches(
    backend: str,
    cell: Cell,
    base: Shape,
    device: torch.device,
    *,
    host: str | None = None,
    platform: GraphPlatform | None = None,
) -> dict[str, dict[str, float]]:
    """Launches and copies of a step by kind, of ours and of the direct loop."""
    _, ours, direct = _built(backend, cell, base, device, host, platform or graphs_of(device))
    found = {"step": count_launches(ours.step, range(4), device)}
    if direct is not None:
        found["direct"] = count_launches(direct.step, range(4), device)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_shape(parser, requests=None, length=0, layers=32)
    parser.add_argument("--cells", type=argument(Cell.parse), help=f"B x context (default: {FULL})")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument("--rounds", type=count, default=7, help="samples of each loop, taken in turns (7)")
    parser.add_argument("--no-profile", action="store_true", help="don't count launches and copies")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the table there")
    return parser.parse_args(argv)


def _free(device: torch.device) -> None:
    """Pools of the cell before are garbage by now, in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _say(backend: str, cell: Cell, error: Exception, left_out: dict[str, str]) -> None:
    left_out[f"{backend} {cell}"] = f"{type(error).__name__}: {error}"
    print(f"     {backend} {cell} left out: {error}", file=sys.stderr, flush=True)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is within the limits, 1 if not, 2 if nothing could be measured."""
    args = _arguments(argv)
    device, base = torch.device(args.device), shape_of(args, 1)
    offer_interpreter(device)
    if device.type == "cpu" and not args.mla:  # computes in the calls, perhaps in an interpreter
        base = replace(base, num_q=4, num_kv=2, dim=16)
    cells = args.cells or Cell.parse(QUICK if args.quick else FULL)
    found: list[Measured] = []
    left_out: dict[str, str] = {}
    for cell in cells:
        for backend in args.backends:
            try:
                found.append(measure_cell(backend, cell, base, device, rounds=args.rounds))
                print(found[-1].row(), flush=True)
            except (AnyattnError, AssertionError, torch.cuda.OutOfMemoryError) as error:
                _say(backend, cell, error, left_out)
            _free(device)
    counted: dict[str, Any] = {}
    for backend in {} if args.no_profile else dict.fromkeys(each.backend for each in found):
        counted[backend] = launches(backend, cells[0], base, device)
        print(f"launches and copies of a step, {backend}: {counted[backend]}", flush=True)
        _free(device)
    print(table(found))
    if args.markdown:
        Path(args.markdown).write_text(table(found) + "\n", encoding="utf-8")
    if args.json:
        record = {
            "device": device_name(device),
            "versions": versions(),
            "step": f"preparation and {base.layers} layers, {cells[0].shape(base)}",
            "limits": LIMITS,
            "cells": [asdict(each) | {"faults": list(each.faults)} for each in found],
            "launches": counted,
            "left_out": left_out,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not found:
        return 2
    return int(any(each.faults for each in found) or "AssertionError" in " ".join(left_out.values()))


if __name__ == "__main__":
    sys.exit(main())
