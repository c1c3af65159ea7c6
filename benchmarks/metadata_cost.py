"""What preparing a decode step costs: host time, copies from the device, forced waits.

    python -m benchmarks.metadata_cost --backends triton,flashinfer,fa3 --device cuda --json out.json
    python -m benchmarks.metadata_cost --backends flashmla --mla --device cuda
    python -m benchmarks.metadata_cost --backends torch_native --device cpu --requests 1,8    # smoke test

One call is `init_forward_metadata(batch)` for one layer's group: lengths, rows and slots are CPU tensors
(pinned for a GPU), other ones every step. Beside it, where the library plans by itself, its own planning of
the same steps, fed with offsets that are on the host and a page table that is on the device already (fa3: its
`get_scheduler_metadata` alone, on lengths that are there). The two take turns; `rest` is the difference.
Copies from the device are counted in torch's profiler, and a run in
`torch.cuda.set_sync_debug_mode("error")` must pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from anyattn.bench.harness.report import device_name, versions
from anyattn.command_line import at_least, counts, one_line_errors
from anyattn.errors import AnyattnError
from benchmarks.direct import RECIPES, NoRecipe, Shape, Stage
from benchmarks.direct.command import add_shape, offer_interpreter, shape_of

__all__ = ["HOST_LIMITS_US", "PLAN_LIMIT", "Preparation", "main", "prepare"]

HOST_LIMITS_US = {"triton": 60.0, "fa3": 60.0, "flashmla": 60.0}
"""At 256 requests."""
OWN_CALL_APART = ("fa3",)
"""Limited without the library's own planning call, which is part of a step here as in its direct use."""
PLAN_LIMIT = 1.1
"""FlashInfer's preparation over its own `plan`, at 256 requests."""
NO_COPIES = ("triton", "fa3", "flashmla", "flashinfer")
_AT = 256


@dataclass(frozen=True)
class Preparation:
    """One backend at one batch size. Times in us a step, medians.

    Attributes:
        own_plan_us: the library's own planning; `plan_ratio`: ours over it, median of the rounds.
        copies: device-to-host copies of a step, None on a CPU. waits: why a forced wait was refused, or "".
        judged: measured on a GPU.
    """

    backend: str
    requests: int
    host_us: float
    quartiles_us: tuple[float, float]
    own_plan_us: float | None
    plan_ratio: float | None
    copies: float | None
    waits: str
    judged: bool

    @property
    def without_own_us(self) -> float | None:
        """What is left of a step when the library's own planning call is taken away; None without one."""
        return None if self.own_plan_us is None else self.host_us - self.own_plan_us

    @property
    def faults(self) -> tuple[str, ...]:
        """Limits that are exceeded."""
        found = []
        if not self.judged:
            return ()
        if self.backend in NO_COPIES and (self.copies or self.waits):
            found.append(f"{self.copies} copies from the device {self.waits}".rstrip())
        limit = HOST_LIMITS_US.get(self.backend)
        apart = self.without_own_us if self.backend in OWN_CALL_APART else None
        spent, what = (self.host_us, "") if apart is None else (apart, " beside the library's own call")
        if self.requests == _AT and limit is not None and spent > limit:
            found.append(f"more than {limit:.0f} us{what}")
        if self.requests == _AT and self.backend == "flashinfer" and (self.plan_ratio or 0) > PLAN_LIMIT:
            found.append(f"more than {PLAN_LIMIT} x its own plan")
        return tuple(found)

    def row(self) -> str:
        """A line of the table."""
        low, high = self.quartiles_us
        own = "-" if self.own_plan_us is None else f"{self.own_plan_us:.1f} ({self.plan_ratio:.2f} x)"
        rest = "-" if self.without_own_us is None else f"{self.without_own_us:.1f}"
        copies = "-" if self.copies is None else f"{self.copies:g}"
        verdict = "; ".join(self.faults) or ("ok" if self.judged else "")
        spread = f"({low:.1f} to {high:.1f})"
        times = f"{self.host_us:>10.1f} {spread:22}{own:>20}{rest:>9}"
        return f"{self.backend:14}{self.requests:>5}{times}{copies:>8}  {verdict}".rstrip()


HEAD = f"{'backend':14}{'B':>5}{'us a step':>10} {'(quartiles)':22}{'own plan':>20}{'rest':>9}{'copies':>8}"


def _timed(call: Callable[[int], object], calls: int, device: torch.device) -> float:
    """us a call; the device is idle before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.disable()
    try:
        started = time.perf_counter()
        for step in range(calls):
            call(step)
        return (time.perf_counter() - started) * 1e6 / calls
    finally:
        gc.enable()


def _copies(call: Callable[[int], object], calls: int, device: torch.device) -> float | None:
    """Device-to-host copies a call, by the profiler."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for step in range(calls):
            call(step)
        torch.cuda.synchronize(device)
    return sum("DtoH" in event.name for event in profiled.events()) / calls


def _waits(call: Callable[[int], object], calls: int, device: torch.device) -> str:
    """What torch says of an operation that waits for the device; empty if none does."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(calls):
            call(step)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _own_plan(stage: Stage, backend: str) -> Callable[[int], object] | None:
    """The library's own planning of the stage's steps, where it has one and a recipe knows it."""
    try:
        plan = RECIPES[backend](stage).plan
    except NoRecipe:
        return None
    steps = len(stage.batches)
    return None if plan is None else lambda step: plan(step % steps)


def prepare(
    backend: str, shape: Shape, device: torch.device, rounds: int = 31, calls: int = 4
) -> Preparation:
    """Measure one backend at one batch size; `calls` steps a sample.

    Raises:
        AnyattnError: it doesn't serve here.
    """
    stage = Stage(backend, shape, device)
    batches = stage.batches

    def ours(step: int) -> object:
        return stage.backend.init_forward_metadata(batches[step % len(batches)])

    own = _own_plan(stage, backend)
    times: list[tuple[float, float]] = []
    for turn in range(rounds + 3):
        first = _timed(ours, calls, device) if turn % 2 else None
        beside = _timed(own, calls, device) if own is not None else 0.0
        times.append((_timed(ours, calls, device) if first is None else first, beside))
    times = times[3:]  # warm-up
    low, middle, high = statistics.quantiles([a for a, _ in times], n=4, method="inclusive")
    return Preparation(
        backend=backend,
        requests=shape.requests,
        host_us=middle,
        quartiles_us=(low, high),
        own_plan_us=statistics.median(b for _, b in times) if own is not None else None,
        plan_ratio=statistics.median(a / b for a, b in times) if own is not None else None,
        copies=_copies(ours, calls, device),
        waits=_waits(ours, calls, device),
        judged=device.type == "cuda",
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_shape(parser, requests=None, length=2048, layers=1)
    parser.add_argument("--requests", type=counts, default=[1, 64, 256], help="batch sizes (1,64,256)")
    parser.add_argument(
        "--rounds", type=at_least(2), default=31, help="samples of each, taken in turns (2 or more)"
    )
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is within the limits, 1 if not, 2 if nothing could be measured."""
    args = _arguments(argv)
    device = torch.device(args.device)
    offer_interpreter(device)
    sizes = args.requests
    print(f"preparing decode steps on {device_name(device)}: {shape_of(args, sizes[0])}\n{HEAD}", flush=True)
    found: list[Preparation] = []
    left_out: dict[str, str] = {}
    for backend in args.backends:
        for size in sizes:
            try:
                found.append(prepare(backend, shape_of(args, size), device, args.rounds))
                print(found[-1].row(), flush=True)
            except AnyattnError as error:
                left_out[f"{backend} {size}"] = f"{type(error).__name__}: {error}"
                print(f"{backend} {size} left out: {error}", file=sys.stderr, flush=True)
    if args.json:
        record = {
            "device": device_name(device),
            "versions": versions(),
            "limits": {
                "host_us": HOST_LIMITS_US,
                "own_call_apart": OWN_CALL_APART,
                "plan_ratio": PLAN_LIMIT,
                "copies": 0,
                "requests": _AT,
            },
            "preparations": [
                asdict(each) | {"without_own_us": each.without_own_us, "faults": list(each.faults)}
                for each in found
            ],
            "left_out": left_out,
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not found:
        return 2
    return int(any(each.faults for each in found))


if __name__ == "__main__":
    sys.exit(main())
