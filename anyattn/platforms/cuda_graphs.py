"""CUDA (and HIP) graphs and events behind the interface of `core.graph.objects`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.core.streams import EventRecorder
from anyattn.errors import GraphError

__all__ = ["CUDAFence", "CUDAGraph", "CUDAGraphPlatform"]


class CUDAGraph(GraphObject):
    """One `torch.cuda.CUDAGraph` in the platform's memory pool."""

    def __init__(self, platform: CUDAGraphPlatform) -> None:
        self._platform, self._graph = platform, torch.cuda.CUDAGraph()
        self._captured = False

    def capture(self, body: Callable[[], None]) -> None:
        """Record `body` on the platform's capture stream; other threads and streams may go on working."""
        with self.recording():
            body()

    @contextmanager
    def recording(self, after: GraphObject | None = None) -> Iterator[None]:
        """Record a block. Segments of a step share the pool, and are replayed in the order of capture."""
        if self._captured or torch.cuda.is_current_stream_capturing():
            raise GraphError(
                "capture inside another capture" if not self._captured else "this graph is captured already",
                asked="a second capture",
                allowed="one at a time, one for each graph",
                hint="capture this graph before or after the other one; platform.new_graph()",
            )
        platform = self._platform
        try:
            with torch.cuda.graph(
                self._graph, pool=platform.pool, stream=platform.stream, capture_error_mode="thread_local"
            ):
                yield
        except GraphError:
            raise
        except Exception as error:  # torch reports a broken capture by whatever call noticed it
            self._graph = torch.cuda.CUDAGraph()
            raise GraphError(
                f"the capture failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
                asked="a step that can be recorded",
                allowed="work on the device of static shape: no host sync, no copy to the host",
                hint="`anyattn verify BACKEND --graphs` and `anyattn lint` name what can't be recorded",
            ) from error
        self._captured = True
        # Once a step: the launch itself, without a frame around it.
        self.replay = self._graph.replay  # type: ignore[method-assign]

    def replay(self) -> None:
        """One launch on the current stream. Raises `GraphError` before a capture."""
        raise GraphError("replay before a capture", allowed="a captured graph", hint="graph.capture(body)")


class CUDAFence(Fence):
    """A CUDA event."""

    def __init__(self, device: torch.device) -> None:
        self._events = EventRecorder(device)
        self._event = self._events.new_event()

    def record(self) -> None:
        """On the current stream."""
        self._events.record(self._event)

    def wait(self) -> None:
        """By the current stream."""
        self._event.wait()

    def synchronize(self) -> None:
        """By the host."""
        self._event.synchronize()


class CUDAGraphPlatform(GraphPlatform):
    """Graphs of one device that share a memory pool, captured on a stream of their own."""

    name = "cuda"

    def __init__(self, device: torch.device | str | None = None) -> None:
        """Raises `GraphError` where torch sees no GPU."""
        if not torch.cuda.is_available():
            raise GraphError(
                "CUDA graphs without a GPU",
                asked=device,
                allowed="a CUDA or ROCm device",
                hint="RecorderPlatform replays on a CPU, for tests",
            )
        self.device = torch.device("cuda" if device is None else device)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_graph(self) -> CUDAGraph:
        """An empty graph."""
        return CUDAGraph(self)

    def new_fence(self) -> CUDAFence:
        """A fence that nothing was marked with."""
        return CUDAFence(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        """Bytes of the segments that the caching allocator keeps for these graphs."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self.pool))
