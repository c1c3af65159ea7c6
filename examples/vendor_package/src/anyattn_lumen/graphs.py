"""Graphs on Lumen. The imaginary chip has no command buffers; anyattn's recorder does what they would.

With a real one, `capture` begins a capture in its runtime, runs the body and ends it, `replay` launches what
came out, and a fence is an event on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.core.graph.recorder import RecorderFence, RecorderPlatform

__all__ = ["LumenGraphs"]


class _LumenGraph(GraphObject):
    def __init__(self, commands: GraphObject) -> None:
        self._commands = commands

    def capture(self, body: Callable[[], None]) -> None:
        """Record the commands that `body` gives."""
        self._commands.capture(body)

    def replay(self) -> None:
        """Give them again, on the same addresses."""
        self._commands.replay()


class LumenGraphs(GraphPlatform):
    """Graph objects of one device, which share memory."""

    name = "lumen"

    def __init__(self, device: torch.device | str) -> None:
        self.device, self._buffers = torch.device(device), RecorderPlatform()

    def new_graph(self) -> GraphObject:
        """An empty graph."""
        return _LumenGraph(self._buffers.new_graph())

    def new_fence(self) -> Fence:
        """A fence that nothing has been marked with."""
        return RecorderFence()

    def synchronize(self) -> None:
        """Work on this device is done when its call returns."""

    def memory_bytes(self) -> int:
        """Bytes that the graphs hold."""
        return self._buffers.memory_bytes()
