"""Operator arguments that live on the host, such as lists of lengths: a capture freezes them.

An adapter says at each such call where its values come from; a graph object that can rewrite them collects
these sources during a capture, in the order of the calls, and reads them again before every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["HostArguments", "collecting_host_arguments", "last_noted", "note_host_arguments"]

HostArguments = Callable[[], Mapping[str, Sequence[int]]]
"""Current values of one recorded call's host arguments, by argument name. Called before each replay."""

_sources: ContextVar[list[HostArguments] | None] = ContextVar("anyattn_host_arguments", default=None)


@contextmanager
def collecting_host_arguments() -> Iterator[list[HostArguments]]:
    """A list that is filled, inside the block, with the source of every call that is noted."""
    found: list[HostArguments] = []
    token = _sources.set(found)
    try:
        yield found
    finally:
        _sources.reset(token)


def note_host_arguments(source: HostArguments) -> None:
    """Say that the next recorded call has host arguments. Outside a collecting capture: does nothing.

    `source` must follow the plan: what it returns after `replan` is what the replay uses.
    """
    found = _sources.get()
    if found is not None:
        found.append(source)


def last_noted() -> HostArguments | None:
    """The source of the call that is being recorded; None outside a collecting capture.

    For stand-ins of such operators: what they record reads their lists here again, as an updated graph would.
    """
    found = _sources.get()
    return found[-1] if found else None
