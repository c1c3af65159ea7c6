"""Where facts are read from. Everything that touches the machine goes through a `Sources`, so that tests
can give a file tree, an environment and an NVML library of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NVML_NAMES", "Sources", "load_nvml"]

NVML_NAMES = (
    "libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
)
"""Names tried in turn: the loader's search path, then the places where containers mount the driver."""


def load_nvml() -> Any:
    """The NVML library through ctypes; `OSError` when no driver is installed. Creates no device context."""
    first, *others = NVML_NAMES
    try:
        return ctypes.CDLL(first)
    except OSError:  # raised here if at all: kept in a local, it would hold its callers in a cycle
        for name in others:
            with suppress(OSError):
                return ctypes.CDLL(name)
        raise


def _usable_cpus() -> int | None:
    """CPUs that this process may run on; None where the system can't say."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count()


def _writable(folder: Path) -> bool:
    """A folder that can be written, or made; looks only, so that read-only mounts count for root too."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


@dataclass(frozen=True)
class Sources:
    """One machine to look at.

    Attributes:
        root: prefix of `/proc`, `/sys`, `/dev`, `/opt` and `/usr`.
        environ: environment variables.
        path: folders searched for distributions and modules; None = `sys.path` as it is now.
        machine: the instruction set, as `platform.machine()` names it.
        nvml: returns the NVML library or raises.
        cpus: returns the number of usable CPUs, or None.
        writable: whether a folder is there and can be written, or can be made.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    path: tuple[str, ...] | None = None
    machine: str = field(default_factory=platform.machine)
    nvml: Callable[[], Any] = load_nvml
    cpus: Callable[[], int | None] = _usable_cpus
    writable: Callable[[Path], bool] = _writable

    def program(self, name: str) -> Path | None:
        """A program by its path, or by its name on this machine's PATH; None when it can't be run."""
        found = shutil.which(name, path=self.environ.get("PATH", ""))
        return Path(found) if found else None

    def at(self, path: str) -> Path:
        """`path` (absolute) under the root."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Contents of a file, stripped; None when it can't be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None
