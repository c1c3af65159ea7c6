"""Which backends of this machine the demo model can be run through: one by one, then in pairs on one pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

import anyattn
from anyattn.api import registry
from anyattn.core.capabilities import Phase
from anyattn.core.select.decision import Decision, Rejected
from anyattn.errors import SelectionError

__all__ = ["EVERY", "Pairs", "decide", "every_pair", "usable"]

EVERY = "every"
"""In place of names: whatever this machine can run."""
_PAGE = 16


@dataclass(frozen=True)
class Pairs:
    """`found`: (prefill, decode) that share a pool. `refused`: those that don't, and why."""

    found: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str, str], ...]


def decide(
    specs: Sequence[anyattn.AttentionSpec],
    dtype: torch.dtype,
    device: str,
    prefill: str,
    decode: str,
    limits: anyattn.Limits | None = None,
) -> Decision:
    """The decision for a pair, on pages of 16 tokens where both read those.

    Raises:
        SelectionError: one of them can't serve the model here, or they share no pool.
    """

    def ask(page_size: int | None) -> Decision:
        return anyattn.select(
            list(specs), dtype=dtype, device=device, limits=limits, page_size=page_size,
            prefill=prefill, decode=decode,
        )  # fmt: skip

    try:
        return ask(_PAGE)
    except SelectionError:
        return ask(None)


def usable(
    specs: Sequence[anyattn.AttentionSpec], dtype: torch.dtype, device: str, phase: Phase
) -> tuple[str, ...]:
    """Backends that pass a phase on this machine, in the order of the catalog."""
    decision = anyattn.select(list(specs), dtype=dtype, device=device)
    passing = {
        c.backend for c in decision.candidates if c.phase is phase and not isinstance(c.verdict, Rejected)
    }
    return tuple(name for name in registry().names() if name in passing)


def every_pair(
    specs: Sequence[anyattn.AttentionSpec], dtype: torch.dtype, device: str, names: Iterable[str]
) -> Pairs:
    """All pairs of `names` (or of what is usable, for `EVERY`), prefill by decode."""
    given = list(names)
    prefills = decodes = given
    if given == [EVERY]:
        prefills = list(usable(specs, dtype, device, Phase.PREFILL))
        decodes = list(usable(specs, dtype, device, Phase.DECODE))
    found: list[tuple[str, str]] = []
    refused: list[tuple[str, str, str]] = []
    for prefill in prefills:
        for decode in decodes:
            try:
                decide(specs, dtype, device, prefill, decode)
                found.append((prefill, decode))
            except SelectionError as error:
                refused.append((prefill, decode, str(error)))
    return Pairs(tuple(found), tuple(refused))
