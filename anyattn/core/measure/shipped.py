"""Which tables are read: those that ship for the architecture, or what `ANYATTN_MEASUREMENTS` names."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from anyattn.core.measure.table import MeasuredTable, Provenance, load_table
from anyattn.env import read

__all__ = ["NONE", "file_name", "shipped_tables", "tables_for"]

NONE = "none"
"""Value of `ANYATTN_MEASUREMENTS` that ranks without measurements."""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def file_name(provenance: Provenance) -> str:
    """Name of the file that ships a table: architecture, then device."""
    return f"{_slug(provenance.arch)}.{_slug(provenance.device)}.json"


@functools.cache
def shipped_tables(arch: str) -> tuple[MeasuredTable, ...]:
    """Tables of this package for an architecture (`cuda:sm90`), by name."""
    folder = resources.files("anyattn") / "data" / "measured"
    names = (f.name for f in folder.iterdir()) if folder.is_dir() else iter(())
    mine = sorted(n for n in names if n.startswith(f"{_slug(arch)}.") and n.endswith(".json"))
    return tuple(load_table(Path(str(folder / name))) for name in mine)


def tables_for(arch: str, environ: Mapping[str, str] | None = None) -> tuple[MeasuredTable, ...]:
    """Tables to rank by: of `ANYATTN_MEASUREMENTS` (paths as in PATH, or `none`), else those that ship.

    Raises:
        ConfigError: a file that can't be read, or is no measured table.
    """
    given = read("ANYATTN_MEASUREMENTS", environ)
    if given is None:
        return shipped_tables(arch)
    if given == NONE:
        return ()
    return tuple(load_table(path) for path in given.split(os.pathsep) if path)
