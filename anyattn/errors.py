"""Every error class. Each message names what was asked, what is allowed and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AnyattnError",
    "BackendBuildError",
    "BatchError",
    "ConfigError",
    "ContextError",
    "FeatureError",
    "GraphError",
    "HostLengthError",
    "LibraryError",
    "PlanError",
    "PoolError",
    "SelectionError",
    "UnknownNameError",
    "nearest",
]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


class AnyattnError(Exception):
    """Base of all errors: `asked` / `allowed` / `hint` are kept as attributes and shown in the text."""

    def __init__(
        self, message: str, *, asked: object = None, allowed: object = None, hint: str | None = None
    ) -> None:
        self.message, self.asked, self.allowed, self.hint = message, asked, allowed, hint
        parts = [message]
        if asked is not None:
            parts.append(f"asked: {asked}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        text = "; ".join(parts)
        super().__init__(f"{text}. Next: {hint}" if hint else text)


class ConfigError(AnyattnError, ValueError):
    """An option, environment variable or type that can't be taken."""


class UnknownNameError(ConfigError):
    """A name (backend, option, variable, host) that nobody registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        guess = nearest(name, names)
        hint = f"did you mean {guess!r}?" if guess else "choose one of the allowed names"
        super().__init__(f"unknown {kind}", asked=repr(name), allowed=", ".join(names), hint=hint)


class SelectionError(AnyattnError):
    """No backend, or not the one that was asked for, can serve the request."""


class LibraryError(AnyattnError):
    """A kernel library is missing, broken, or too old."""


class BackendBuildError(AnyattnError):
    """A chosen backend could not be constructed."""


class BatchError(AnyattnError, ValueError):
    """A `ForwardBatch` whose fields disagree with each other or with the tables."""


class HostLengthError(BatchError):
    """A backend needs lengths on the host that the batch doesn't have."""


class PlanError(AnyattnError):
    """A plan that doesn't belong to this batch, layer or backend."""


class ContextError(PlanError):
    """An attention layer was called outside `forward_context`."""


class FeatureError(AnyattnError):
    """A feature was asked for that the backend doesn't declare."""


class PoolError(AnyattnError, ValueError):
    """KV storage that is too small, of the wrong layout or dtype, or already in use."""


class GraphError(AnyattnError):
    """Capture or replay that would go wrong."""
