"""A platform as data: what a vendor's package says about its accelerator. No torch, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anyattn.core.capabilities import Preference

__all__ = ["PlatformRecord", "SimulatedHost"]


@dataclass(frozen=True)
class SimulatedHost:
    """A typical machine: device name, memory in bytes, SMs / CUs / AI cores / CPU cores."""

    device_name: str
    memory_bytes: int
    num_units: int
    features: frozenset[str] = frozenset()
    machine: str = "x86_64"


@dataclass(frozen=True, kw_only=True)
class PlatformRecord:
    """A family of accelerators by name. What touches a driver stands behind lazy `module:name` paths.

    Attributes:
        name: `cuda`, `ascend`, …: the first half of `platform:arch`.
        device: torch's device type of its tensors.
        preferences: which backend to prefer on which chip, with evidence.
        hosts: architecture (without the platform) -> a typical machine, so that it can be simulated.
        detect: function `(Sources) -> Found` (`anyattn.detect.found`) that looks for devices without
            creating a context; empty for the built-in platforms, whose readers are in `anyattn.detect`.
        graph: class that derives from `core.graph.objects.GraphPlatform`; empty = no graphs.
        runtime: version that a simulated host's driver supports.
        contract: `CONTRACT_VERSION` that the record was written for, as a number of its own.
        origin: the distribution that it came from; filled in when it is admitted.
    """

    name: str
    summary: str
    device: str
    preferences: tuple[Preference, ...] = ()
    hosts: Mapping[str, SimulatedHost] = field(default_factory=dict)
    detect: str = ""
    graph: str = ""
    runtime: str | None = None
    contract: int | None = None
    origin: str = "anyattn"

    @property
    def targets(self) -> tuple[str, ...]:
        """`platform:arch` of every chip that can be simulated."""
        return tuple(f"{self.name}:{arch}" for arch in self.hosts)
