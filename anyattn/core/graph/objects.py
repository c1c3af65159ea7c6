"""What a platform supplies to capture and replay: graph objects that share memory, and fences.

CUDA graphs, NPU graphs and the CPU recorder implement these; everything above them is written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from anyattn.errors import GraphError

__all__ = ["Fence", "GraphObject", "GraphPlatform"]


class GraphObject(ABC):
    """One captured piece of device work. It freezes addresses and keeps alive only what it allocated itself:
    tensors from outside that it reads or writes must be held by whoever owns the graph."""

    @abstractmethod
    def capture(self, body: Callable[[], None]) -> None:
        """Record `body` (once). Memory that it allocates comes from the platform's shared pool.

        Raises:
            GraphError: a host sync or a shape that depends on device values inside `body`, or a capture
                inside another one.
        """

    def recording(self, after: GraphObject | None = None) -> AbstractContextManager[None]:
        """Record the work of a `with` block (once), as `capture` does; how a step is captured in segments.

        `after`: the segment before this one in the same step. Memory that it left alive stays valid until
        this one is replayed.

        Raises:
            GraphError: as `capture`, or a platform whose graphs are captured in one piece.
        """
        raise GraphError(
            f"{type(self).__name__} is captured in one piece",
            asked="segments with eager attention between them",
            allowed="a platform whose graphs have `recording`",
            hint="capture whole steps (GraphRunner), or run prefill eagerly",
        )

    @abstractmethod
    def replay(self) -> None:
        """Run the recorded work on the current stream, on the recorded addresses."""


class Fence(ABC):
    """A point in device work that the host or another stream can wait for."""

    @abstractmethod
    def record(self) -> None:
        """Mark the work given to the current stream so far."""

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream wait for the mark; the host goes on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait for the mark."""


class GraphPlatform(ABC):
    """Makes graph objects; all of one platform object share one memory pool (graphs run one at a time)."""

    name: str

    @abstractmethod
    def new_graph(self) -> GraphObject:
        """An empty graph."""

    @abstractmethod
    def new_fence(self) -> Fence:
        """A fence that nothing has been marked with: waiting for it returns at once."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait for all work of the device."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Bytes that the graphs captured so far hold on the device."""
