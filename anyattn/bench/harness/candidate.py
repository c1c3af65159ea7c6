"""What is timed: a name, one call on each of several copies of its inputs, and the work of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = ["Candidate", "Work", "cache_bytes", "rotations"]

_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 * 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Work:
    """Of one call: bytes that must move (read + written), floating-point operations, and things done."""

    bytes: float = 0.0
    flops: float = 0.0
    items: float = 0.0
    item: str = "items"


@dataclass(frozen=True)
class Candidate:
    """One thing to time.

    Attributes:
        runs: the call, once per copy of its inputs; timed calls rotate through them, so that with
            `rotations` copies each call finds its inputs outside the cache.
        setup: run before each sample, untimed; a sample is then one call.
    """

    name: str
    runs: Sequence[Callable[[], object]]
    work: Work = field(default_factory=Work)
    setup: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"candidate {self.name!r} has nothing to run")


def cache_bytes(device: torch.device | str) -> int:
    """Size of the last-level cache: L2 of a GPU, the largest one of CPU 0."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_size(p.read_text()) for p in _CPU_CACHES.glob("index*/size")] if _CPU_CACHES.is_dir() else []
    return max(sizes, default=_UNKNOWN_CACHE)


def _size(text: str) -> int:
    text = text.strip()
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)


def rotations(bytes_per_copy: int, device: torch.device | str, *, at_least: int = 2) -> int:
    """Copies of inputs that together are twice the last-level cache: what cold timing needs."""
    return max(at_least, -(-2 * cache_bytes(device) // max(1, bytes_per_copy)))
