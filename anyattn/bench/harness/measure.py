"""The measurement itself: every round samples every candidate once, starting with another one each time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyattn.bench.harness.candidate import Candidate
from anyattn.bench.harness.limits import measure_limits
from anyattn.bench.harness.report import Report, Result, device_name, versions
from anyattn.bench.harness.timers import Timer, make_timer

__all__ = ["Settings", "measure"]


@dataclass(frozen=True)
class Settings:
    """How long and how.

    Attributes:
        rounds: samples of each candidate. warmup: samples thrown away before.
        sample_seconds: calls are repeated until a sample takes about this long.
        graph: time CUDA-graph replays.
        limits: measure the machine's limits in the same run, products in `limits_dtype`.
    """

    rounds: int = 9
    warmup: int = 2
    sample_seconds: float = 0.02
    graph: bool = False
    limits: bool = True
    limits_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warmup < 0 or self.sample_seconds < 0:
            raise ValueError(f"rounds >= 1, warmup >= 0, sample_seconds >= 0, not {self}")


def measure(
    title: str,
    candidates: Sequence[Candidate],
    device: torch.device | str = "cpu",
    settings: Settings | None = None,
    *,
    timer: Timer | None = None,
) -> Report:
    """Time all candidates against each other.

    Interleaving makes drift (clocks, neighbours) hit all alike; `Report.ratio` compares round by round.

    Raises:
        ValueError: no candidate, or a name twice.
    """
    settings = settings or Settings()
    names = [c.name for c in candidates]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"candidates need distinct names, not {names}")
    device = torch.device(device)
    timer = timer or make_timer(device, graph=settings.graph)
    load_before = _load()
    calls = _warm_up(candidates, timer, settings)
    limits = measure_limits(device, settings.limits_dtype) if settings.limits else None
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(settings.rounds):
        first = turn % len(candidates)
        for candidate in [*candidates[first:], *candidates[:first]]:
            samples[candidate.name].append(timer.sample(candidate, calls[candidate.name]))
    results = [Result(c.name, tuple(samples[c.name]), calls[c.name], c.work) for c in candidates]
    return Report(
        title=title,
        device=device_name(device),
        versions=versions(),
        threads=torch.get_num_threads(),
        load=(load_before, _load()),
        graph=settings.graph,
        limits=limits,
        results=tuple(results),
    )


def _warm_up(candidates: Sequence[Candidate], timer: Timer, settings: Settings) -> dict[str, int]:
    """Warm every candidate; calls per sample of each."""
    calls = {}
    for candidate in candidates:
        for _ in range(settings.warmup):
            timer.sample(candidate, len(candidate.runs))
        calls[candidate.name] = timer.calls_for(candidate, settings.sample_seconds)
    return calls


def _load() -> float:
    """Load average of the last minute: who else was on the machine."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
