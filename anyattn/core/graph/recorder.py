"""The CPU recorder: graph objects with the semantics of CUDA graphs, for tests on any machine.

A capture runs its body once and writes down each operation with the addresses that it used; a replay runs the
same operations on the same memory, and none of the body's Python. As on a device, a graph keeps nothing alive
that it didn't allocate, graphs share memory, and host syncs and shapes that depend on device values are
refused. Two things differ: the capture's own run takes effect, and memory is freed only with the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from anyattn.core.capturing import marked_as_capturing
from anyattn.core.graph.host_arguments import collecting_host_arguments
from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.core.graph.recorder_memory import spoil
from anyattn.core.graph.recorder_rules import here
from anyattn.core.graph.recorder_steps import CallMode, OpMode, Recording, compiling_nothing, run_steps
from anyattn.errors import GraphError

__all__ = ["Outside", "RecorderFence", "RecorderGraph", "RecorderPlatform", "Seam", "record_call"]

Seam = Callable[[], AbstractContextManager[None]]
"""Entered for the time of a capture: sends opaque launches to `record_call`."""

_active: ContextVar[Recording | None] = ContextVar("anyattn_recording", default=None)


def record_call(fn: Callable[..., None], tensors: Sequence[torch.Tensor], name: str) -> None:
    """Run `fn(*tensors)`: a kernel that torch doesn't know; a capture records it as one step.

    `fn` must hold no tensor itself: a replay calls it with tensors at the recorded addresses. Whatever else
    it holds is frozen, as a kernel's arguments are.
    """
    recording = _active.get()
    if recording is None or recording.paused:
        fn(*tensors)
    else:
        recording.call(fn, tensors, name)


@dataclass(frozen=True)
class Outside:
    """Memory that a graph reads or writes and doesn't own: its first byte, bytes, and who used it first."""

    address: int
    nbytes: int
    first_use: str


class RecorderGraph(GraphObject):
    """Made by `RecorderPlatform.new_graph`."""

    def __init__(self, platform: RecorderPlatform) -> None:
        self._platform = platform
        self._recording: Recording | None = None
        self._chain = object()

    def capture(self, body: Callable[[], None]) -> None:
        """Run `body` once and record it. After a refusal the graph is empty; others are untouched.

        Raises:
            GraphError: captured already, a capture inside another, a host sync or a shape that depends on
                device values (both named, with the line).
        """
        with self.recording():
            body()

    @contextmanager
    def recording(self, after: GraphObject | None = None) -> Iterator[None]:
        """Record a block. Replays of a chain of segments leave each other's memory alone.

        Raises:
            GraphError: as `capture`.
        """
        if _active.get() is not None:
            raise GraphError(
                "capture inside another capture",
                asked=f"a second capture at {here()}",
                allowed="one at a time",
                hint="capture this graph before or after the other one",
            )
        if self._recording is not None:
            raise GraphError(
                "this graph is captured already",
                asked="a second capture",
                allowed="one capture for each graph",
                hint="platform.new_graph()",
            )
        recording = Recording()
        with self._recorded(recording):
            yield
        if recording.broken is not None:
            raise recording.broken()
        recording.memory.finish()
        self._recording = recording
        if isinstance(after, RecorderGraph):
            self._chain = after._chain
        if self._platform.poison:
            self._spoil()

    @contextmanager
    def _recorded(self, recording: Recording) -> Iterator[None]:
        token = _active.set(recording)
        try:
            with ExitStack() as stack:
                stack.enter_context(compiling_nothing())
                stack.enter_context(collecting_host_arguments())
                for seam in self._platform.seams:
                    stack.enter_context(seam())
                for context in (
                    torch.no_grad(), marked_as_capturing(), CallMode(recording), OpMode(recording)
                ):  # fmt: skip
                    stack.enter_context(context)
                yield
        finally:
            _active.reset(token)

    def replay(self) -> None:
        """Run the recorded operations.

        Raises:
            GraphError: not captured; inside a capture; memory that the graph reads is gone or has moved
                (found before anything runs).
        """
        if _active.get() is not None:
            raise GraphError(
                "replay inside a capture", asked=f"a replay at {here()}", allowed="replays between captures",
                hint="run the replay before or after the capture",
            )  # fmt: skip
        recording = self._captured("replay")
        storages = recording.memory.resolve()
        if self._platform.poison:
            self._platform.spoil_others(self)
        with torch.no_grad():
            run_steps(recording, storages, poison=self._platform.poison)

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what a replay runs, in order."""
        return tuple(s.name for s in self._captured("operations").steps if not s.unwritten)

    @property
    def outside(self) -> tuple[Outside, ...]:
        """Memory that its owner must keep alive and in place."""
        tracked = self._captured("outside").memory.tracked
        return tuple(Outside(t.address, t.nbytes, t.first) for t in tracked if not t.inside)

    def kept_bytes(self) -> int:
        """Bytes of its memory that stay between replays: what the body allocated and somebody holds."""
        return sum(s.nbytes() for s in self._own())

    def peak_bytes(self) -> int:
        """Most bytes that its temporaries take at once."""
        recording = self._recording
        return 0 if recording is None else recording.memory.peak_bytes(recording.born())

    def _own(self) -> list[torch.UntypedStorage]:
        return [] if self._recording is None else self._recording.memory.own()

    def _spoil(self) -> None:
        for storage in self._own():
            spoil(storage)

    def _captured(self, what: str) -> Recording:
        if self._recording is None:
            raise GraphError(
                f"{what} before a capture", asked=what, allowed="a captured graph", hint="graph.capture(body)"
            )
        return self._recording


class RecorderFence(Fence):
    """Work on a CPU is done when its call returns: there is nothing to wait for."""

    def record(self) -> None:
        """Everything given so far is done."""

    def wait(self) -> None:
        """Returns at once."""

    def synchronize(self) -> None:
        """Returns at once."""


class RecorderPlatform(GraphPlatform):
    """Makes recorded graphs.

    Attributes:
        poison: a replay overwrites the memory of all other graphs of this platform with NaN, but for those of
            the same step; a capture leaves NaN in its results, and unwritten memory is NaN. What a shared
            pool *may* do, it then does.
        seams: entered during a capture; the Triton kernels' is `kernels.triton.recording`'s.
    """

    name = "cpu-recorder"

    def __init__(self, *, poison: bool = False, seams: Sequence[Seam] = ()) -> None:
        self.poison, self.seams = poison, tuple(seams)
        self._graphs: weakref.WeakSet[RecorderGraph] = weakref.WeakSet()

    def new_graph(self) -> RecorderGraph:
        """An empty graph."""
        graph = RecorderGraph(self)
        self._graphs.add(graph)
        return graph

    def new_fence(self) -> RecorderFence:
        """A fence."""
        return RecorderFence()

    def synchronize(self) -> None:
        """Returns at once."""

    def memory_bytes(self) -> int:
        """What the living graphs keep, and the most that one of them takes for temporaries: they share it."""
        graphs = list(self._graphs)
        return sum(g.kept_bytes() for g in graphs) + max((g.peak_bytes() for g in graphs), default=0)

    def spoil_others(self, graph: RecorderGraph) -> None:
        """NaN in the memory of every graph but this one and the other segments of its step."""
        for other in list(self._graphs):
            if other._chain is not graph._chain:
                other._spoil()
