"""Compilation in worker processes: two cores are used, and a compiler that aborts ends one job only."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from anyattn.kernels.triton.aot_report import Report

if TYPE_CHECKING:
    from anyattn.kernels.triton.aot import Entry

__all__ = ["DEFAULT_LIST", "Job", "compile_all", "load_entries"]

DEFAULT_LIST = "anyattn.kernels.triton.configs.aot:ENTRIES"


@dataclass(frozen=True)
class Job:
    """One entry on one target, by name. `kernel` and `shared_limit` are for reports of jobs that died."""

    entry: str
    target: str
    kernel: str = ""
    shared_limit: int = 0


def load_entries(source: str = DEFAULT_LIST) -> dict[str, Entry]:
    """Entries of `module:NAME` by name."""
    module, _, name = source.partition(":")
    return {entry.name: entry for entry in getattr(importlib.import_module(module), name)}


def compile_all(
    jobs: Sequence[Job],
    *,
    source: str = DEFAULT_LIST,
    workers: int = 2,
    timeout: float = 240.0,
    done: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Reports of all jobs, in their order; `done` is called with each as it comes.

    Every compilation is fresh (the cache is a temporary folder). One that takes more than `timeout`
    seconds, or whose process dies, is reported as a problem.
    """
    reports: dict[Job, Report] = {}
    queue = list(reversed(jobs))
    with tempfile.TemporaryDirectory() as folder:
        running: list[_Worker] = []
        try:
            while queue or running:
                while queue and len(running) < workers:
                    running.append(_Worker(source, Path(folder), timeout, queue.pop()))
                for worker in _ready(running):
                    report, alive = worker.collect()
                    reports[worker.job] = report
                    done(report)
                    if alive and queue:
                        worker.give(queue.pop())
                    else:
                        worker.stop()
                        running.remove(worker)
        finally:
            for worker in running:
                worker.stop()
    return [reports[job] for job in jobs]


def _ready(running: Sequence[_Worker]) -> Iterator[_Worker]:
    """Workers with a result, dead ones, and those past their time."""
    deadline = min(worker.deadline for worker in running)
    # A dead process closes its end of the pipe, which counts as readable.
    waiting = wait([worker.pipe for worker in running], max(0.0, deadline - time.monotonic()))
    return iter([w for w in running if w.pipe in waiting or time.monotonic() >= w.deadline])


class _Worker:
    """A process that compiles one job at a time."""

    def __init__(self, source: str, folder: Path, timeout: float, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False) as log:
            self._log = Path(log.name)
        self._process: BaseProcess = context.Process(
            target=_serve, args=(other, source, str(folder), str(self._log)), daemon=True
        )
        self._process.start()
        other.close()
        self._timeout = timeout
        self.give(job)

    def give(self, job: Job) -> None:
        self.job = job
        self.deadline = time.monotonic() + self._timeout
        with contextlib.suppress(OSError):  # already dead: `collect` reports it
            self.pipe.send((job.entry, job.target))

    def collect(self) -> tuple[Report, bool]:
        """The current job's report, and whether the process can take another."""
        if self.pipe.poll():
            with contextlib.suppress(EOFError, OSError):
                return self.pipe.recv(), True
            self._process.join(5)
            why = f"the compiler's process ended with code {self._process.exitcode}"
        else:
            why = f"not compiled after {self._timeout:.0f} s"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        if lines:
            why = f"{why}: {lines[-1][:200]}"
        job = self.job
        return Report(job.entry, job.kernel, job.target, job.shared_limit, problems=[why]), False

    def stop(self) -> None:
        self.pipe.close()
        self._process.join(0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, source: str, folder: str, log: str) -> None:
    """The worker's main: Triton reads its environment when it is imported, so that is set first."""
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default changes in Triton 3.10
    os.environ.pop("TRITON_INTERPRET", None)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)  # a compiler that aborts says why on stderr
    from anyattn.kernels.triton.aot import ALL_TARGETS, measure

    entries = load_entries(source)
    while True:
        try:
            entry, target = pipe.recv()
        except EOFError:
            return
        pipe.send(measure(entries[entry], ALL_TARGETS[target]))
