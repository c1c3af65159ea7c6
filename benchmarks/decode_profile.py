"""Where the time of a whole decode step goes: SmolLM2, or a model of Llama-3-8B's shape with random weights.

    python -m benchmarks.decode_profile --model llama-8b --requests 64 --context 1024 --json out.json
    python -m benchmarks.decode_profile --model tiny --device cpu --requests 4 --context 64    # smoke test

Requests of equal length decode in the demo engine (graphs where there are some). Told of a step: its
wall-clock time, the time in which a kernel ran on the device by kind of kernel (torch.profiler, in steps of
their own), what is left (*idle*), and what the host does in it; with and without `run_ahead`. Idle time is
what a better host could still remove.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import anyattn
from anyattn.bench.harness.command import device_here, output_file
from anyattn.bench.harness.report import device_name, versions
from anyattn.command_line import at_least, count, counts, one_line_errors
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.inflight import InFlight
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.weights import Checkpoint, LlamaConfig, find_gguf, load_gguf
from benchmarks.direct.command import offer_interpreter

__all__ = ["SHAPES", "Profile", "RandomTensors", "busy_seconds", "main", "profile"]

SHAPES = {
    "llama-8b": LlamaConfig(32, 4096, 14336, 32, 8, 128, 128256, 8192, 5e5, 1e-5),
    "smollm2-135m": LlamaConfig(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5),
    "tiny": LlamaConfig(2, 64, 128, 4, 2, 16, 256, 512, 1e4, 1e-5),
}
"""Models with random weights. `llama-8b`: sizes of Llama 3 8B (arXiv 2407.21783, table 3); `smollm2-135m`:
those of the demo model, for machines without its weights."""
KINDS = {
    "attention": ("decode", "merge", "flash", "fmha", "BatchPrefill", "BatchDecode", "combine", "attention"),
    "kv write": ("write", "reshape_and_cache"),
    "tables": ("metadata", "tables", "ranges", "prepare_varlen"),
    "products": ("gemm", "nvjet", "cutlass", "splitK", "gemv", "cublas"),
    "copies": ("Memcpy", "Memset"),
}
"""Kinds of kernels by parts of their names, the first that fits; anything else is `other`."""


class RandomTensors(dict[str, torch.Tensor]):
    """Weights that are drawn when they are asked for: a model of 8B parameters never lies in memory twice."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads = (config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        hidden, ffn = config.hidden_size, config.ffn_size
        self._sizes = {
            "token_embd": (config.vocab_size, hidden), "output": (config.vocab_size, hidden),
            "attn_q": (heads[0], hidden), "attn_k": (heads[1], hidden), "attn_v": (heads[1], hidden),
            "attn_output": (hidden, heads[0]), "attn_norm": (hidden,), "output_norm": (hidden,),
            "ffn_norm": (hidden,),
            "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn),
        }  # fmt: skip
        self._like = torch.empty(0, dtype=dtype, device=device)

    def __missing__(self, name: str) -> torch.Tensor:
        size = self._sizes[name.removesuffix(".weight").rsplit(".", 1)[-1]]
        drawn = torch.randn(size, dtype=self._like.dtype, device=self._like.device)
        return drawn.mul_(size[-1] ** -0.5) if len(size) > 1 else drawn.mul_(0.1).add_(1.0)

    def get(self, name: str, default: Any = None) -> Any:
        """A model asks so for what it may lack; nothing is lacking here."""
        return self[name]


@dataclass(frozen=True)
class Profile:
    """Medians over steps, in seconds.

    Attributes:
        step: wall clock. busy: some kernel ran (None without a GPU). kinds: busy time by kind of kernel.
        host: phases of the host by name; `wait` is the host waiting for the step's tokens.
        kernels: launched in a step. graphs: what the engine says of them. ahead: steps were launched ahead.
    """

    model: str
    requests: int
    context: int
    backend: str
    graphs: str
    ahead: bool
    step: float
    busy: float | None
    kinds: Mapping[str, float]
    host: Mapping[str, float]
    kernels: int

    @property
    def idle(self) -> float | None:
        """Of a step, no kernel ran."""
        return None if self.busy is None else max(0.0, self.step - self.busy)

    def lines(self) -> list[str]:
        """For a reader."""
        shown = [
            f"{self.model}, {self.requests} requests of {self.context} tokens, {self.backend}; {self.graphs}",
            f"step {self.step * 1e6:.0f} us, {self.requests / self.step:.0f} tokens/s, "
            f"{'launched ahead' if self.ahead else 'one after another'}",
        ]
        if self.busy is not None and self.idle is not None:
            shown += [
                f"  device busy {self.busy * 1e6:.0f} us in {self.kernels} kernels, "
                f"idle {self.idle * 1e6:.0f} us ({self.idle / self.step:.1%})"
            ]
            shown += [f"    {name:10} {t * 1e6:9.1f} us" for name, t in self.kinds.items()]
        return [*shown, *(f"  host: {name:10} {t * 1e6:9.1f} us" for name, t in self.host.items())]


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals `(begin, end)`."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def profile(engine: Engine, name: str, context: int, requests: int, steps: int) -> Profile:
    """Fill the engine with requests of `context` tokens, then time decode steps of all of them."""
    draw = random.Random(0)
    answer = SamplingParams(max_new_tokens=4 * steps + 8, ignore_eos=True)
    for _ in range(requests):
        engine.add([draw.randrange(200) for _ in range(context)], answer)
    while engine.scheduler.waiting or any(r.prefilling for r in engine.scheduler.running):
        engine.step()
    for _ in range(steps):  # clocks settle after the prefill
        engine.step()
    with _phases(engine) as phases:
        for _ in range(steps // 2):
            engine.step()
    busy, kinds, kernels = _device(engine, max(2, steps // 4))
    walls = [_seconds(engine.step) for _ in range(steps)]
    return Profile(
        name, requests, context, engine.decision.decode.backend, engine.graphs_note,
        bool(engine.config.run_ahead), statistics.median(walls), busy, kinds,
        {phase: statistics.median(seen) for phase, seen in phases.items()}, kernels,
    )  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def _phases(engine: Engine) -> Iterator[dict[str, list[float]]]:
    """Seconds of each part of the host's work, a list a phase, while the block runs."""
    seen: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = call(*args, **kwargs)
            seen[name].append(time.perf_counter() - started)
            return found

        return run

    where: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"), (engine.scheduler, "schedule_ahead", "schedule"),
        (engine, "_list_pages", "pages"), (engine, "_batch", "batch"), (engine, "_compute", "compute"),
        (InFlight, "wait", "wait"), (engine.scheduler, "finish_step", "finish"),
    ]  # fmt: skip
    kept = [(owner, name, owner.__dict__.get(name), getattr(owner, name)) for owner, name, _ in where]
    for owner, name, phase in where:
        setattr(owner, name, timed(phase, getattr(owner, name)))
    try:
        yield seen
    finally:
        for owner, name, own, _ in kept:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _device(engine: Engine, steps: int) -> tuple[float | None, dict[str, float], int]:
    """Busy seconds a step, those of each kind, and kernels a step; None without a GPU."""
    if engine.model.device.type != "cuda":
        return None, {}, 0
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in found.events() or () if str(e.device_type).endswith("CUDA")]
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    kinds: dict[str, float] = defaultdict(float)
    for event in events:
        kinds[kind_of(event.name)] += (event.time_range.end - event.time_range.start) / steps * 1e-6
    ordered = dict(sorted(kinds.items(), key=lambda kind: -kind[1]))
    return busy_seconds(spans) / steps * 1e-6, ordered, len(events) // steps


def kind_of(kernel: str) -> str:
    """Which of `KINDS`, or `other`."""
    return next((kind for kind, parts in KINDS.items() if any(p in kernel for p in parts)), "other")


def _model(name: str, device: torch.device, context: int) -> LlamaModel:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "smollm2":
        checkpoint = load_gguf(find_gguf())
    else:
        config = replace(SHAPES[name], max_context=max(context, SHAPES[name].max_context))
        checkpoint = Checkpoint(config, RandomTensors(config, dtype, device), {})
    return LlamaModel(checkpoint, dtype=dtype, device=device, max_context=context)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print a profile for each batch size that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=("smollm2", *SHAPES), default="smollm2")
    parser.add_argument("--requests", type=counts, default=[1, 64])
    parser.add_argument("--context", type=count, default=1024, help="tokens of a request's prompt")
    parser.add_argument("--steps", type=at_least(2), default=40)
    parser.add_argument("--backend", help="default: the choice of anyattn.select")
    parser.add_argument("--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    offer_interpreter(device)
    longest = args.context + 4 * args.steps + 16
    model, found = _model(args.model, device, longest), []
    for requests, ahead in itertools.product(args.requests, (False, True)):
        config = EngineConfig(
            max_batch=requests, max_context=longest, chunk=8192, page_size=16, backend=args.backend,
            prefix_reuse=False, run_ahead=ahead,
        )  # fmt: skip
        try:
            engine = Engine(model, config)
        except anyattn.AnyattnError as error:
            print(f"{requests} requests: {error}")
            return 2
        found.append(profile(engine, args.model, args.context, requests, args.steps))
        print("\n".join(found[-1].lines()), flush=True)
    if args.json:
        record = {
            "device": device_name(device),
            "versions": versions(),
            "profiles": [asdict(p) for p in found],
        }
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
