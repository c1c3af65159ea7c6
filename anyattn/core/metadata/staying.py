"""Pinned memory that a device may still read when its owner dies.

torch's allocator of pinned memory hands a block out again once the copies that it knows of are done. Of
kernels that read such a block by themselves it knows nothing: it would be overwritten under them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["keep_until_read", "sweep"]

_staying: deque[tuple[object, Any, Callable[[], bool] | None]] = deque()
"""What is held, the event behind its last use, and how that event is marked where it isn't yet.

A deque: it is added to in finalizers, which may run in the middle of anything here.
"""


def keep_until_read(memory: object, event: Any, mark: Callable[[], bool] | None = None) -> None:
    """Hold `memory` until `event` is done.

    `mark` puts the event behind the last use; False: not now, it is tried again in each `sweep`. None: it is
    there already.
    """
    _staying.append((memory, event, None if mark is None or mark() else mark))


def sweep() -> None:
    """Let go of what has been read. Asks events, so never while a stream is captured."""
    for _ in range(len(_staying)):
        memory, event, mark = _staying.popleft()
        if mark is not None:
            _staying.append((memory, event, None if mark() else mark))
        elif not event.query():
            _staying.append((memory, event, None))
