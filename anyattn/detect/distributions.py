"""One installed distribution: its version, what it asks of torch, and whether a module is really its own.

Several distributions ship the same module name and the one installed last silently wins. The RECORD of
the winner has the hash of the file that is on disk; the loser's hasn't.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["Claim", "Installed", "every", "find", "locate"]

HASHED_UP_TO = 1 << 20
"""Larger files (compiled modules) are told apart by their size alone, bytes."""


@dataclass(frozen=True)
class Claim:
    """A RECORD line for a module: the file, its hash (`sha256=…`) and its size, where given."""

    file: Path
    digest: str
    size: str

    def holds(self) -> bool:
        """True if the file on disk is the one that the distribution installed."""
        try:
            if self.size.isdigit() and self.file.stat().st_size != int(self.size):
                return False
            algorithm, _, digest = self.digest.partition("=")
            if not digest or self.file.stat().st_size > HASHED_UP_TO:
                return True
            found = hashlib.new(algorithm, self.file.read_bytes()).digest()
        except (OSError, ValueError):
            return False
        return base64.urlsafe_b64encode(found).rstrip(b"=").decode() == digest.rstrip("=")


class Installed:
    """A distribution on this machine, read lazily and without its own imports."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self._distribution = distribution

    @cached_property
    def _header(self) -> str:
        text = self._distribution.read_text("METADATA") or self._distribution.read_text("PKG-INFO") or ""
        return text.replace("\r\n", "\n").partition("\n\n")[0]

    def field(self, name: str) -> list[str]:
        """Values of a metadata field (parsing the whole file would also read its long description)."""
        return re.findall(rf"^{re.escape(name)}:[ \t]*(.+?)[ \t]*$", self._header, re.MULTILINE)

    @property
    def name(self) -> str:
        """The name as its metadata spells it; empty when the metadata is unreadable."""
        return next(iter(self.field("Name")), "")

    @property
    def version(self) -> str | None:
        """Its version, None when the metadata is unreadable."""
        return next(iter(self.field("Version")), None)

    @cached_property
    def _record(self) -> str:
        return self._distribution.read_text("RECORD") or ""

    @property
    def lists_files(self) -> bool:
        """False for editable and distribution-packaged installs, which name no module files."""
        return ".py," in self._record or ".so," in self._record

    @property
    def folder(self) -> Path:
        """The folder it is installed in."""
        return Path(str(self._distribution.locate_file("")))

    @property
    def installed_at(self) -> float:
        """When, as the time stamp of its RECORD; 0 if unknown. Seconds since the epoch."""
        match = re.search(r"^(.+\.dist-info/RECORD),", self._record, re.MULTILINE)
        try:
            return (self.folder / match.group(1)).stat().st_mtime if match else 0.0
        except OSError:
            return 0.0

    def claim(self, module: str) -> Claim | None:
        """The RECORD line of `module`, None when it doesn't list it."""
        base = re.escape(module.replace(".", "/"))
        for pattern in (
            rf"{base}/__init__\.py",
            rf"{base}\.py",
            rf"{base}\.[\w.-]*so",
            rf"{base}/[^/,]+\.py",
        ):
            match = re.search(rf"^({pattern}),([^,]*),(.*)$", self._record, re.MULTILINE)
            if match:
                return Claim(self.folder / match.group(1), match.group(2), match.group(3).strip())
        return None


def find(name: str, path: tuple[str, ...] | None) -> Installed | None:
    """The distribution called `name` that comes first on `path` (None = `sys.path`)."""
    return next(_discover(name, path), None)


def every(path: tuple[str, ...] | None) -> Iterator[Installed]:
    """All distributions. Slow: only for naming who overwrote a file."""
    return _discover(None, path)


def _discover(name: str | None, path: tuple[str, ...] | None) -> Iterator[Installed]:
    # Absolute folders: importlib lists the folder called "" and folders that aren't there anew each time.
    folders = sys.path if path is None else path
    where = [os.path.abspath(folder) for folder in folders if os.path.isdir(folder or ".")]
    context = metadata.DistributionFinder.Context(name=name, path=where)
    return map(Installed, metadata.Distribution.discover(context=context))


def locate(module: str, path: tuple[str, ...] | None) -> Path | None:
    """The file (or namespace folder) that `import module` would load. Imports nothing."""
    top, *rest = module.split(".")
    spec = _spec(top, path)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not rest:
        return Path(spec.origin) if spec.origin and spec.has_location else next(iter(folders), None)
    return next((file for folder in folders if (file := _inside(folder.joinpath(*rest)))), None)


def _spec(top: str, path: tuple[str, ...] | None) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top) if path is None else PathFinder.find_spec(top, list(path))
    except (ImportError, ValueError, AttributeError):
        return None


def _inside(base: Path) -> Path | None:
    for file in (base / "__init__.py", base.with_name(base.name + ".py")):
        if file.is_file():
            return file
    return base if base.is_dir() else next(iter(sorted(base.parent.glob(base.name + ".*so"))), None)
