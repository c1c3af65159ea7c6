"""Clocks: the host's for a CPU, events on the current stream for CUDA, graph replay on request."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch

from anyattn.bench.harness.candidate import Candidate

__all__ = ["CpuTimer", "CudaTimer", "Timer", "make_timer"]


class Timer(ABC):
    """Seconds of a call, averaged over a few calls in a row."""

    @abstractmethod
    def sample(self, candidate: Candidate, calls: int) -> float:
        """Seconds per call over `calls` calls that rotate through the candidate's inputs."""

    def calls_for(self, candidate: Candidate, seconds: float, most: int = 10_000) -> int:
        """Calls that take about `seconds` together; 1 for a candidate with a set-up."""
        if candidate.setup is not None:
            return 1
        once = max(self.sample(candidate, len(candidate.runs)), 1e-9)
        return min(most, max(len(candidate.runs), round(seconds / once)))


def _run(candidate: Candidate, calls: int) -> None:
    runs = candidate.runs
    for index in range(calls):
        runs[index % len(runs)]()


class CpuTimer(Timer):
    """Wall clock."""

    def sample(self, candidate: Candidate, calls: int) -> float:
        """See `Timer.sample`."""
        if candidate.setup is not None:
            candidate.setup()
        started = time.perf_counter()
        _run(candidate, calls)
        return (time.perf_counter() - started) / calls


class CudaTimer(Timer):
    """Events around the calls, after a synchronisation.

    Args:
        graph: capture one round of a candidate's `runs` and time replays of it: kernels without launch gaps.
    """

    def __init__(self, device: torch.device, *, graph: bool = False) -> None:
        self.device, self.graph = device, graph
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def sample(self, candidate: Candidate, calls: int) -> float:
        """See `Timer.sample`; with a graph, `calls` is rounded up to whole rounds."""
        if candidate.setup is not None:
            candidate.setup()
        rounds = -(-calls // len(candidate.runs))
        replay = self._captured(candidate).replay if self.graph else None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            start.record()
            if replay is None:
                _run(candidate, calls)
            else:
                calls = rounds * len(candidate.runs)
                for _ in range(rounds):
                    replay()
            end.record()
            torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def prepare(self, candidate: Candidate) -> None:
        """Capture its graph, where graphs are timed: what can't be captured raises here, not in a round."""
        if self.graph:
            self._captured(candidate)

    def _captured(self, candidate: Candidate) -> torch.cuda.CUDAGraph:
        if candidate.name not in self._graphs:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                _run(candidate, 2 * len(candidate.runs))
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                _run(candidate, len(candidate.runs))
            self._graphs[candidate.name] = graph
        return self._graphs[candidate.name]


def make_timer(device: torch.device | str, *, graph: bool = False) -> Timer:
    """The clock of a device.

    Raises:
        ValueError: graph replay on a device without graphs.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaTimer(device, graph=graph)
    if graph:
        raise ValueError(f"graph replay needs a CUDA device, not {device}")
    return CpuTimer()
