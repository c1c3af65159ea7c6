"""`torch_npu.npu`: streams, events and NPU graphs whose host lists are replaced at each replay.

From torch-npu 2.13's `npu/graphs.py`. A graph captured with `auto_dispatch_capture=True` waits, at each
replay and before each recorded call, for an event that `update` sets after it has put new lists in place;
whoever waits for the stream before that waits for ever, which is a `RuntimeError` here. Keys that a call
hasn't are dropped silently, as there. Torch's operations are recorded by our CPU recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from anyattn.core.graph.recorder_steps import CallMode, OpMode, Recording, run_steps
from anyattn.testing.emulators.torch_npu_caches import chip
from anyattn.testing.emulators.torch_npu_operators import Record, capturing

__all__ = ["Event", "NPUGraph", "Stream", "graph", "npu_names"]

_SOC = {"310p": 202, "910b": 223, "910c": 253}


class _Queue:
    """The one stream that matters: replays that wait for lists."""

    def __init__(self) -> None:
        self.waiting: list[NPUGraph] = []

    def drain(self) -> None:
        """Raises `RuntimeError` where a device would never come back."""
        if self.waiting:
            raise RuntimeError("hangs: a replayed graph waits for NPUGraph.update(cpu_update_input)")


class NPUGraph:
    """`torch.npu.NPUGraph`."""

    queue = _Queue()

    def __init__(self) -> None:
        self.auto_dispatch_capture = False
        self.records: list[Record] = []
        self.graph_dispatch_mode = SimpleNamespace(graph_dispatch_records=self.records)
        self._recording: Recording | None = None
        self._updated = False

    @property
    def dispatching(self) -> bool:
        """Calls with host lists are recorded so that they can be updated."""
        return self.auto_dispatch_capture

    def call(self, fn: Callable[..., None], tensors: Sequence[torch.Tensor], name: str) -> None:
        """One operator of the graph that is being captured."""
        assert self._recording is not None
        self._recording.call(fn, tensors, name)

    def replay(self) -> None:
        """Run; with recorded lists, once an update has come.

        Raises:
            RuntimeError: not captured, or the replay before still waits.
        """
        if self._recording is None:
            raise RuntimeError("Called NPUGraph::replay without a preceding successful capture.")
        self.queue.drain()
        if self.records and not self._updated:
            self.queue.waiting.append(self)
        else:
            self._run()

    def _run(self) -> None:
        assert self._recording is not None
        self._updated = False
        with torch.no_grad():
            run_steps(self._recording, self._recording.memory.resolve(), poison=True)

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """New lists: one mapping a recorded call, in order, or one for all.

        Raises:
            RuntimeError: captured without `auto_dispatch_capture`, or another number of mappings.
        """
        if not self.auto_dispatch_capture:
            raise RuntimeError("The current graph configuration does not support update")
        given = list(cpu_update_input) * (len(self.records) if len(cpu_update_input) == 1 else 1)
        if len(given) != len(self.records):
            raise RuntimeError(
                f"{len(self.records)} operators need to be updated, {len(given)} elements came"
            )
        for record, values in zip(self.records, given, strict=True):
            record.fresh.update({k: v for k, v in values.items() if k in record.names})
        self._updated = True
        if self in self.queue.waiting:
            self.queue.waiting.remove(self)
            self._run()

    def reset(self) -> None:
        """Forget what was captured."""
        self._recording = None
        self.records.clear()

    def pool(self) -> object:
        """Of its memory."""
        return self


class graph:
    """`torch.npu.graph`: a block whose work is captured into `npu_graph`."""

    def __init__(
        self, npu_graph: NPUGraph, pool: Any = None, stream: Any = None, auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global", **_: Any,
    ) -> None:  # fmt: skip
        self._graph, self._stack = npu_graph, ExitStack()
        npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        recording = self._graph._recording = Recording()
        token = capturing.set(self._graph)
        self._stack.callback(capturing.reset, token)
        for context in (torch.no_grad(), CallMode(recording), OpMode(recording)):
            self._stack.enter_context(context)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.close()
        recording = self._graph._recording
        assert recording is not None
        if error is not None or recording.broken is not None:
            self._graph.reset()
            if recording.broken is not None and error is None:
                raise recording.broken()
            return
        recording.memory.finish()


class Event:
    """`torch.npu.Event`: everything has happened, unless a replay waits."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """On a stream."""

    def wait(self, stream: Any = None) -> None:
        """By a stream."""

    def query(self) -> bool:
        """Has it happened?"""
        return not NPUGraph.queue.waiting

    def synchronize(self) -> None:
        """By the host. Raises `RuntimeError` where it would never return."""
        NPUGraph.queue.drain()


class Stream:
    """`torch.npu.Stream`."""

    def __init__(self, **_: Any) -> None: ...

    def wait_event(self, event: Event) -> None:
        """After the event."""

    def wait_stream(self, stream: Stream) -> None:
        """After the stream."""

    def synchronize(self) -> None:
        """By the host. Raises `RuntimeError` where it would never return."""
        NPUGraph.queue.drain()


def npu_names() -> dict[str, Any]:
    """What `torch_npu.npu` holds."""
    NPUGraph.queue = _Queue()
    stream = Stream()
    return {
        "NPUGraph": NPUGraph,
        "graph": graph,
        "graph_pool_handle": lambda: object(),
        "is_current_stream_capturing": lambda: capturing.get() is not None,
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: NPUGraph.queue.drain(),
        "memory_reserved": lambda device=None: 0,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: f"Ascend{chip().upper()}",
        "get_soc_version": lambda: _SOC[chip()],
    }
