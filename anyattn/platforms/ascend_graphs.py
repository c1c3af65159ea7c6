"""NPU graphs: `torch.npu.NPUGraph` with host lists updated at each replay.

Operators that take lengths as host lists are recorded with what the lists held (torch-npu's
`npu/graphs.py`, 2.13): each records an event that the replay waits for, and `NPUGraph.update` sets it after
it has put new lists in place. Not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyattn.core.capturing import marked_as_capturing
from anyattn.core.graph.host_arguments import HostArguments, collecting_host_arguments
from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.errors import GraphError

__all__ = ["AscendGraph", "AscendGraphPlatform", "NPUFence"]


class AscendGraph(GraphObject):
    """Made by `AscendGraphPlatform.new_graph`. Keeps the sources of its host arguments alive."""

    def __init__(self, platform: AscendGraphPlatform) -> None:
        self._platform = platform
        self._graph: Any = None
        self._sources: list[HostArguments] = []
        self._done = platform.new_fence()

    def capture(self, body: Callable[[], None]) -> None:
        """Record `body` (once) in the platform's pool.

        Raises:
            GraphError: as `recording`.
        """
        with self.recording():
            body()

    @contextmanager
    def recording(self, after: GraphObject | None = None) -> Iterator[None]:
        """Record the work of a `with` block (once) in the platform's pool.

        Args:
            after: the segment before this one, whose memory the pool keeps while tensors of it are alive.

        Raises:
            GraphError: captured already; calls with host lists that nobody told the graph about, or more of
                them than were recorded: a replay would run with old lengths, or wait for ever.
        """
        del after
        if self._graph is not None:
            raise GraphError(
                "this graph is captured already",
                asked="a second capture",
                allowed="one capture for each graph",
                hint="platform.new_graph()",
            )
        npu, graph = self._platform.npu, self._platform.npu.NPUGraph()
        with (
            collecting_host_arguments() as sources,
            marked_as_capturing(),
            self._platform.counting_memory(),
            npu.graph(graph, pool=self._platform.pool, auto_dispatch_capture=True),
        ):
            yield
        recorded = len(graph.graph_dispatch_mode.graph_dispatch_records)
        if recorded != len(sources):
            raise GraphError(
                "host lists of a captured step can't be updated one for one",
                asked=f"{recorded} recorded calls with host lists",
                allowed=f"{len(sources)}, as many as the backends noted",
                hint="call such operators through an anyattn backend, which notes them "
                "(note_host_arguments), or outside the graph",
            )
        self._graph, self._sources = graph, sources

    def replay(self) -> None:
        """Run the graph, then put this step's lists in place: its calls wait for them.

        The replay before must be over by then, or it would take the new lists' events for its own; the host
        waits for that. Graphs without host lists are replayed without waiting.

        Raises:
            GraphError: not captured.
        """
        if self._graph is None:
            hint = "graph.capture(body)"
            raise GraphError("replay before a capture", asked="replay", allowed="a captured graph", hint=hint)
        if not self._sources:
            self._graph.replay()
            return
        values = [dict(source()) for source in self._sources]
        self._done.synchronize()
        self._graph.replay()
        self._graph.update(cpu_update_input=values)
        self._done.record()


class NPUFence(Fence):
    """`torch.npu.Event`."""

    def __init__(self, npu: Any) -> None:
        self._npu, self._event = npu, npu.Event()
        self._marked = False

    def record(self) -> None:
        """On the current stream."""
        self._event.record()
        self._marked = True

    def wait(self) -> None:
        """The current stream waits."""
        if self._marked:
            self._npu.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """The host waits."""
        if self._marked:
            self._event.synchronize()


class AscendGraphPlatform(GraphPlatform):
    """Makes NPU graphs that share one memory pool.

    Attributes:
        npu: `torch.npu`, which importing `torch_npu` adds. pool: handle of the memory pool.
    """

    name = "ascend"

    def __init__(self, npu: Any = None) -> None:
        """Raises `GraphError` where torch has no NPU."""
        found = getattr(torch, "npu", None) if npu is None else npu
        if found is None or not hasattr(found, "NPUGraph"):
            raise GraphError(
                "NPU graphs need torch-npu",
                asked="torch.npu.NPUGraph",
                allowed="torch-npu imported, on a machine with CANN",
                hint="`anyattn doctor` says what is missing",
            )
        self.npu: Any = found
        self.pool = found.graph_pool_handle()
        self._bytes = 0

    def new_graph(self) -> AscendGraph:
        """An empty graph."""
        return AscendGraph(self)

    def new_fence(self) -> NPUFence:
        """A fence that nothing has been marked with."""
        return NPUFence(self.npu)

    def synchronize(self) -> None:
        """Let the host wait for the device."""
        self.npu.synchronize()

    def memory_bytes(self) -> int:
        """Bytes that the allocator reserved during captures."""
        return self._bytes

    def counting_memory(self) -> _Counter:
        """A block whose reservations count as graphs' memory."""
        return _Counter(self)

    def add_bytes(self, count: int) -> None:
        """`count` more bytes are held by graphs."""
        self._bytes += max(0, count)


class _Counter:
    def __init__(self, platform: AscendGraphPlatform) -> None:
        self._platform, self._before = platform, 0

    def __enter__(self) -> None:
        self._platform.npu.synchronize()
        self._before = self._platform.npu.memory_reserved()

    def __exit__(self, *_: object) -> None:
        self._platform.add_bytes(self._platform.npu.memory_reserved() - self._before)
