"""What one platform's reader returns: the devices that a process would see, and notes on what failed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Device", "Found"]


@dataclass(frozen=True)
class Device:
    """One visible device. `arch` as in `HostFacts.arch`; `memory_bytes` and `num_units` may be unknown."""

    arch: str
    name: str
    memory_bytes: int | None = None
    num_units: int | None = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Found:
    """Devices of one platform, in the order in which torch numbers them.

    `present` counts the devices of the machine, visible or not; `filtered_by` names the environment
    variables that hide some.
    """

    platform: str
    devices: tuple[Device, ...] = ()
    present: int = 0
    driver: str | None = None
    runtime: str | None = None
    filtered_by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
