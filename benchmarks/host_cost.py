"""What a per-layer call costs on the host beyond the library called directly, and under a CUDA graph.

    python -m benchmarks.host_cost --backends triton,flashinfer,fa3 --device cuda --json out.json
    python -m benchmarks.host_cost --backends flashmla --mla --device cuda
    python -m benchmarks.host_cost --backends torch_native --device cpu --layers 2      # smoke test

Both write the step's KV and attend, layer by layer, on the same pool: once as model code does it
(`layer(q, k, v, batch)` in a forward context), once by the recipe in `benchmarks/direct`. Host time is the
time until a step's calls return, never synchronised, on lengths so short that the device keeps up; the two
take turns. Device time is that of a captured graph of all layers, replayed in turns in the same run.
Exit code 1 if a limit is exceeded on a GPU; a CPU computes in the calls, so nothing is judged there.
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
from typing import Any

import torch

import anyattn
from anyattn.bench.harness import Candidate, CudaTimer, Report, Settings, Timer, measure
from anyattn.bench.harness.report import device_name, versions
from anyattn.command_line import at_least, one_line_errors
from anyattn.errors import AnyattnError
from benchmarks.direct import RECIPES, NoRecipe, Recipe, Shape, Stage
from benchmarks.direct.command import add_shape, offer_interpreter, shape_of

__all__ = ["GRAPH_LIMIT", "HOST_LIMIT_US", "Cost", "HostTimer", "cost", "main"]

HOST_LIMIT_US = 12.0
GRAPH_LIMIT = 1.02
_CALLS = 128
"""Layer calls between synchronisations: their launches fit into the driver's queue."""


class HostTimer(Timer):
    """Seconds until calls return. The device is idle before them and not waited for."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self.device, self.layers = device, layers

    def sample(self, candidate: Candidate, calls: int) -> float:
        """See `Timer.sample`; without garbage collection in between."""
        self._wait()
        gc.disable()
        try:
            started = time.perf_counter()
            for index in range(calls):
                candidate.runs[index % len(candidate.runs)]()
            return (time.perf_counter() - started) / calls
        finally:
            gc.enable()
            self._wait()

    def calls_for(self, candidate: Candidate, seconds: float, most: int = 10_000) -> int:
        """So many steps that the launches of all layers fit into the queue; one on a CPU, which computes."""
        return max(1, _CALLS // self.layers) if self.device.type == "cuda" else 1

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Cost:
    """One backend against its library. Host times in us a layer, device times in us a layer under a graph.

    Attributes:
        over_us: median over the rounds of the difference; `over_quartiles_us`: its quartiles.
        graph_ratio: our device time over the library's, None without graphs.
        judged: measured on a GPU.
    """

    backend: str
    decision: str
    direct: str
    write: str
    host_us: float
    direct_host_us: float
    over_us: float
    over_quartiles_us: tuple[float, float]
    graph_us: float | None
    direct_graph_us: float | None
    graph_ratio: float | None
    judged: bool

    @property
    def ok(self) -> bool:
        """Within both limits, or not judged."""
        graph = self.graph_ratio is None or self.graph_ratio <= GRAPH_LIMIT
        return not self.judged or (self.over_us <= HOST_LIMIT_US and graph)

    def __str__(self) -> str:
        verdict = ("ok  " if self.ok else "FAIL") if self.judged else "    "
        low, high = self.over_quartiles_us
        text = (
            f"{verdict} {self.backend}: {self.host_us:.1f} us a layer, {self.direct} "
            f"{self.direct_host_us:.1f} us, difference {self.over_us:.1f} us "
            f"({low:.1f} to {high:.1f}, limit {HOST_LIMIT_US:.0f})"
        )
        if self.graph_ratio is not None:
            text += f"\n     graph: {self.graph_us:.2f} and {self.direct_graph_us:.2f} us a layer, "
            text += f"ratio {self.graph_ratio:.4f} (limit {GRAPH_LIMIT})"
        return f"{text}\n     KV write of the direct call: {self.write}"


def _ours(stage: Stage) -> Callable[[], None]:
    """A step of a model that is nothing but attention."""
    batch, layers, q, k, v = stage.batches[0], stage.layers, stage.q, stage.k, stage.v
    plan = stage.backend.init_forward_metadata(batch)

    def step() -> None:
        with anyattn.forward_context(stage.backend, plan):
            for layer in layers:
                layer(q, k, v, batch)

    return step


def _direct(recipe: Recipe, layers: int) -> Callable[[], None]:
    def step() -> None:
        for number in range(layers):
            recipe.call(number)

    return step


def check_alike(stage: Stage, recipe: Recipe) -> None:
    """Both calls compute the same: a direct call that does less would be no measure."""
    plan = stage.backend.init_forward_metadata(stage.batches[0])
    with anyattn.forward_context(stage.backend, plan):
        ours = stage.layers[0](stage.q, stage.k, stage.v, stage.batches[0])
    direct = recipe.call(0)
    assert isinstance(ours, torch.Tensor)
    assert isinstance(direct, torch.Tensor)
    torch.testing.assert_close(direct.reshape(ours.shape).float(), ours.float(), atol=2e-2, rtol=2e-2)


def cost(backend: str, shape: Shape, device: torch.device, rounds: int = 25) -> Cost:
    """Measure one backend.

    Raises:
        NoRecipe: its library isn't called directly for this shape or build. AnyattnError: it doesn't serve.
        AssertionError: the two compute different things.
    """
    stage = Stage(backend, shape, device)
    recipe = RECIPES[backend](stage)
    check_alike(stage, recipe)
    pair = [Candidate("anyattn", [_ours(stage)]), Candidate("direct", [_direct(recipe, shape.layers)])]
    settings = Settings(rounds=rounds, warmup=3, limits=False)
    host = measure("host", pair, device, settings, timer=HostTimer(device, shape.layers))
    graph = None
    if device.type == "cuda":
        settings = Settings(rounds=rounds, warmup=3, graph=True, limits=False)
        graph = measure("graph", pair, device, settings, timer=CudaTimer(device, graph=True))
    return _cost(stage, recipe, host, graph)


def _cost(stage: Stage, recipe: Recipe, host: Report, graph: Report | None) -> Cost:
    scale = 1e6 / stage.shape.layers
    ours, direct = host.result("anyattn"), host.result("direct")
    over = [(a - b) * scale for a, b in zip(ours.seconds, direct.seconds, strict=True)]
    low, middle, high = statistics.quantiles(over, n=4, method="inclusive")
    chosen = stage.decision.decode
    return Cost(
        backend=chosen.backend,
        decision=f"{chosen.method}, pages of {stage.page}, {stage.pool.layout}",
        direct=recipe.name,
        write=recipe.write,
        host_us=ours.median * scale,
        direct_host_us=direct.median * scale,
        over_us=middle,
        over_quartiles_us=(low, high),
        graph_us=None if graph is None else graph.result("anyattn").median * scale,
        direct_graph_us=None if graph is None else graph.result("direct").median * scale,
        graph_ratio=None if graph is None else graph.ratio("anyattn", "direct").median,
        judged=stage.device.type == "cuda",
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_shape(parser, requests=8, length=64, layers=32)
    parser.add_argument(
        "--rounds", type=at_least(2), default=25, help="samples of each, taken in turns (2 or more)"
    )
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is within the limits, 1 if not, 2 if nothing could be measured."""
    args = _arguments(argv)
    device, shape = torch.device(args.device), shape_of(args)
    offer_interpreter(device)
    print(f"per-layer calls on {device_name(device)}: {shape}", flush=True)
    found: list[Cost] = []
    left_out: dict[str, str] = {}
    for backend in args.backends:
        try:
            found.append(cost(backend, shape, device, args.rounds))
            print(found[-1], flush=True)
        except (NoRecipe, AnyattnError) as error:
            left_out[backend] = f"{type(error).__name__}: {error}"
            print(f"     {backend} left out: {left_out[backend]}", file=sys.stderr, flush=True)
    if args.json:
        _save(args.json, shape, device, found, left_out)
    if not found:
        return 2
    return 0 if all(each.ok for each in found) else 1


def _save(
    path: str, shape: Shape, device: torch.device, found: Sequence[Cost], left_out: dict[str, str]
) -> None:
    rows: list[dict[str, Any]] = [asdict(each) | {"ok": each.ok} for each in found]
    record = {
        "device": device_name(device),
        "versions": versions(),
        "shape": str(shape),
        "limits": {"host_us": HOST_LIMIT_US, "graph_ratio": GRAPH_LIMIT},
        "costs": rows,
        "left_out": left_out,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
