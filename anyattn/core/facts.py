"""What is known about a machine and its kernel libraries. Data: `detect` fills it, selection reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["BuildBlock", "BuildFault", "HostFacts", "LibraryFacts", "LibraryState"]


class LibraryState(Enum):
    """`UNKNOWN`: the distribution is there, nobody imported it. `USABLE` only after a real probe."""

    MISSING = "missing"
    UNKNOWN = "unknown"
    USABLE = "usable"
    BROKEN = "broken"


class BuildFault(Enum):
    """What stops a library that compiles its kernels on the machine that runs them."""

    NO_COMPILER = "no_compiler"
    OLD_COMPILER = "old_compiler"  # older than the chip
    NO_TOOL = "no_tool"  # ninja or the C++ compiler
    CACHE = "cache"  # the folder for compiled kernels can't be written
    DISABLED = "disabled"  # by an environment variable


@dataclass(frozen=True)
class BuildBlock:
    """Why a library can't compile its kernels here (and has none ready), and what to do about it."""

    fault: BuildFault
    detail: str
    remedy: str


@dataclass(frozen=True)
class LibraryFacts:
    """One distribution.

    `modules` are the top-level names that it owns on this host (the last one installed owns a shared
    name); `reason` says why a library is broken; `block` why its kernels can't be compiled here, though it
    may import.
    """

    distribution: str
    version: str | None = None
    modules: tuple[str, ...] = ()
    state: LibraryState = LibraryState.UNKNOWN
    reason: str | None = None
    block: BuildBlock | None = None


@dataclass(frozen=True)
class HostFacts:
    """One machine as selection sees it.

    `platform` is cuda | rocm | ascend | cpu; `arch` is the exact architecture (`sm90`, `gfx942`,
    `910b`, `amx`, `avx512`, `avx2`, `arm`, `generic`): never a family. `runtime` is the CUDA, ROCm or
    CANN version that the driver supports, `torch_build` what torch was built for (`cuda 13.0`, `cpu`).
    `libraries` maps a normalised distribution name to its facts; an absent name is a missing library.
    """

    platform: str
    arch: str
    device_name: str = ""
    device_count: int = 0
    memory_bytes: int | None = None
    num_units: int | None = None  # SMs, CUs, AI cores or CPU cores
    features: frozenset[str] = frozenset()
    driver: str | None = None
    runtime: str | None = None
    python: str | None = None
    torch: str | None = None
    torch_build: str | None = None
    libraries: Mapping[str, LibraryFacts] = field(default_factory=dict)
    simulated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """`platform:arch`, the key of capability rows."""
        return f"{self.platform}:{self.arch}"

    def library(self, distribution: str) -> LibraryFacts:
        """Facts of one distribution; state MISSING when it isn't installed."""
        found = self.libraries.get(distribution)
        return found or LibraryFacts(distribution, state=LibraryState.MISSING)
