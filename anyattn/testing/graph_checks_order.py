"""Checks of graphs: what may happen at the same time, and what a fence promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from anyattn.core.graph.objects import Fence
from anyattn.core.graph.runner import GraphRunner
from anyattn.core.traits import SharedReadEnds
from anyattn.errors import BatchError
from anyattn.testing.checks import Skip
from anyattn.testing.graph_checks import Labs, whole_buckets
from anyattn.testing.graph_lab import GraphLab, GraphStep

__all__ = ["beside_work", "overlap", "read_done", "two_runners"]

_DELAY = 40_000_000
"""Clock cycles that a graph is held back by: tens of milliseconds."""


def read_done(labs: Labs) -> list[str]:
    """Behind `read_done` whatever a scheduler owns may be overwritten: tables, and the batch itself."""
    return [
        f"read_done{' with early tables' if early else ''}: {fault}"
        for early in (False, True)
        for fault in _overwritten(labs, early)
    ]


def _overwritten(labs: Labs, early: bool) -> list[str]:
    lab, runner = labs.lab, labs.early if early else labs.runner
    found: list[str] = []
    for on_device in (False, True):
        step = lab.draw(max(whole_buckets(lab)) - 1, on_device=on_device)
        lab.fill_mask(step)
        want, records = lab.expected(step), 0

        def overwrite(fence: Fence, step: GraphStep = step) -> None:
            nonlocal records
            records += 1
            with _aside(lab, fence):
                lab.table.req_to_token[: lab.requests] = lab.nobody
                for value in (step.batch.req_pool_indices, step.batch.seq_lens, step.batch.out_cache_loc):
                    assert value is not None
                    value.fill_(lab.nobody if value is step.batch.out_cache_loc else 1)
                if step.batch.positions is not None:
                    step.batch.positions.zero_()

        try:
            with _hooked(labs, overwrite):
                got = runner.replay(step.batch, **step.inputs)
            lab.platform.synchronize()
            error = _error(want, got)
        except BatchError as refused:  # the overwritten batch was looked at
            return [*found, f"overwritten behind the fence, and still read: {refused}"]
        finally:
            lab.write_table()
        if records != 1:
            found.append(f"the fence was recorded {records} times in one replay")
        if not error <= lab.tolerance:
            found.append(f"error {error:.3g}: what was overwritten behind the fence was still read")
    return found


def _error(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    from anyattn.testing.oracle import relative_error

    return max(relative_error(got[name], value) for name, value in want.items())


def _delay() -> None:
    torch.cuda._sleep(_DELAY)  # type: ignore[no-untyped-call]


@contextmanager
def _hooked(labs: Labs, on_record: Callable[[Fence], None]) -> Iterator[None]:
    """The hook, and on CUDA a delay before the graph: too early a fence then shows."""
    hooks = labs.hooks
    hooks.on_record = on_record
    hooks.on_replay = _delay if labs.on_cuda else None
    try:
        yield
    finally:
        hooks.on_record = hooks.on_replay = None


@contextmanager
def _aside(lab: GraphLab, fence: Fence) -> Iterator[None]:
    """On CUDA another stream, behind the fence; on a CPU right away."""
    if lab.device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(lab.device)):  # type: ignore[no-untyped-call]
        fence.wait()
        yield


def overlap(labs: Labs) -> list[str]:
    """With early tables a scheduler prepares the next step while the current one runs, and both are right.

    The next step's table rows are written behind `read_done`, on another stream. On CUDA that work must have
    ended while the graph still ran; on a CPU the fence must come before the graph starts.
    """
    lab = labs.lab
    if lab.traits.shared_read_ends > SharedReadEnds.IN_REPLAY:
        raise Skip("kernels read the live request table until the step ends (shared_read_ends)")
    runner, count = labs.early, lab.requests // 2
    now = lab.draw(count)
    rows = [r for r in range(lab.requests) if r not in now.rows][:count]
    following = lab.step(rows, [5] * len(rows))
    lab.table.req_to_token[rows] = lab.nobody
    order: list[str] = []
    done: list[torch.cuda.Event] = []

    def schedule(fence: Fence) -> None:
        order.append("read_done")
        with _aside(lab, fence):
            lab.table.req_to_token[rows] = lab.slots[rows].to(lab.device, torch.int32)
            if labs.on_cuda:
                done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
                done[0].record()  # type: ignore[no-untyped-call]

    def start() -> None:
        order.append("graph")
        if labs.on_cuda:
            _delay()

    lab.fill_mask(now)
    with _hooked(labs, schedule):
        labs.hooks.on_replay = start
        got = {name: x.clone() for name, x in runner.replay(now.batch, **now.inputs).items()}
    found = _overlapped(labs, order, done)
    error = lab.error(now, got)
    if not error <= lab.tolerance:
        found.append(f"error {error:.3g} while the next step was prepared")
    lab.fill_mask(following)
    error = lab.error(following, runner.replay(following.batch, **following.inputs))
    return found if error <= lab.tolerance else [*found, f"error {error:.3g} in the step prepared meanwhile"]


def _overlapped(labs: Labs, order: list[str], done: list[torch.cuda.Event]) -> list[str]:
    if order != ["read_done", "graph"]:
        return [f"read_done doesn't come before the graph: {', '.join(order)}"]
    if not labs.on_cuda:
        return []
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()  # type: ignore[no-untyped-call]
    done[0].synchronize()  # type: ignore[no-untyped-call]
    running = not end.query()  # type: ignore[no-untyped-call]
    return [] if running else ["the next step's preparation ended only after the graph: nothing overlapped"]


def two_runners(labs: Labs) -> list[str]:
    """Two runners on one backend, used in turns: neither disturbs what the other captured."""
    lab, found = labs.lab, []
    runners: list[GraphRunner] = [labs.runner, labs.lab.runner()]
    for turn, count in enumerate((*whole_buckets(lab), *whole_buckets(lab))):
        step = lab.draw(count)
        lab.fill_mask(step)
        error = lab.error(step, runners[turn % 2].replay(step.batch, **step.inputs))
        if not error <= lab.tolerance:
            found.append(f"two runners in turns: error {error:.3g} in turn {turn} ({step})")
    return found


def beside_work(labs: Labs) -> list[str]:
    """A capture while another thread allocates and computes on a stream of its own."""
    if not labs.on_cuda:
        raise Skip("streams and threads don't run beside each other on the recorder")
    lab, stop, worked = labs.make(), threading.Event(), []

    def work() -> None:
        stream = torch.cuda.Stream(lab.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while not stop.is_set():
                x = torch.ones(512, 512, device=lab.device)  # random numbers: torch refuses them in a capture
                worked.append(float((x @ x).sum()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        runner = lab.runner()
    finally:
        stop.set()
        thread.join()
    step = lab.draw(max(whole_buckets(lab)))
    lab.fill_mask(step)
    error = lab.error(step, runner.replay(step.batch, **step.inputs))
    found = [] if worked else ["nothing ran beside the capture"]
    return found if error <= lab.tolerance else [*found, f"captured beside other work: error {error:.3g}"]
