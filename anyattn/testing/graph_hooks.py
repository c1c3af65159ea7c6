"""A graph platform that tells when a fence is recorded and when a graph starts, on any other platform."""

from __future__ import annotations

from collections.abc import Callable

from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform

__all__ = ["HookedFence", "HookedGraph", "HookedPlatform"]


class HookedPlatform(GraphPlatform):
    """Graph objects of `inner`.

    Attributes:
        on_record: called with the fence right after it was recorded. on_replay: called before each replay.
    """

    def __init__(self, inner: GraphPlatform) -> None:
        self.inner, self.name = inner, inner.name
        self.on_record: Callable[[Fence], None] | None = None
        self.on_replay: Callable[[], None] | None = None

    def new_graph(self) -> HookedGraph:
        """A graph of the inner platform."""
        return HookedGraph(self)

    def new_fence(self) -> HookedFence:
        """A fence of the inner platform."""
        return HookedFence(self)

    def synchronize(self) -> None:
        """Of the inner platform."""
        self.inner.synchronize()

    def memory_bytes(self) -> int:
        """Of the inner platform."""
        return self.inner.memory_bytes()


class HookedGraph(GraphObject):
    """`inner`: the graph itself."""

    def __init__(self, platform: HookedPlatform) -> None:
        self._platform, self.inner = platform, platform.inner.new_graph()

    def capture(self, body: Callable[[], None]) -> None:
        """Of the inner graph."""
        self.inner.capture(body)

    def replay(self) -> None:
        """The hook, then the inner graph."""
        if self._platform.on_replay is not None:
            self._platform.on_replay()
        self.inner.replay()


class HookedFence(Fence):
    """Records, then calls the hook."""

    def __init__(self, platform: HookedPlatform) -> None:
        self._platform, self._inner = platform, platform.inner.new_fence()

    def record(self) -> None:
        """Of the inner fence, then the hook."""
        self._inner.record()
        if self._platform.on_record is not None:
            self._platform.on_record(self)

    def wait(self) -> None:
        """Of the inner fence."""
        self._inner.wait()

    def synchronize(self) -> None:
        """Of the inner fence."""
        self._inner.synchronize()
