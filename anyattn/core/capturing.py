"""Is a graph being captured right now? Device values may not be read then, whoever captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["is_capturing", "marked_as_capturing"]

_marked: ContextVar[bool] = ContextVar("anyattn_capturing", default=False)


def is_capturing(device: torch.device) -> bool:
    """True inside `marked_as_capturing`, and while the current CUDA stream is being captured."""
    return _marked.get() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@contextmanager
def marked_as_capturing() -> Iterator[None]:
    """For graph objects that torch can't be asked about: the CPU recorder, NPU graphs."""
    token = _marked.set(True)
    try:
        yield
    finally:
        _marked.reset(token)
