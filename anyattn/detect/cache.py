"""A folder for what is worth keeping between runs. Losing it costs only time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyattn.env import read

__all__ = ["cache_folder", "load", "store"]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`ANYATTN_CACHE_DIR`, else `anyattn` in the user's cache folder (XDG base directories)."""
    chosen = read("ANYATTN_CACHE_DIR", environ)
    if chosen:
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    home = environ.get("HOME")
    return (Path(base) if base else Path(home or "~").expanduser() / ".cache") / "anyattn"


def _file(folder: Path, name: str, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{name}-{digest[:16]}.json"


def load(folder: Path, name: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was stored under `key`; None when nothing readable is."""
    try:
        data = json.loads(_file(folder, name, key).read_text(encoding="utf-8"))
        return dict(data["value"]) if data["key"] == dict(key) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def store(folder: Path, name: str, key: Mapping[str, Any], value: Mapping[str, Any]) -> str | None:
    """Keep `value` (JSON) under `key`. Returns why it couldn't be kept, None if it was."""
    file = _file(folder, name, key)
    partial = file.with_name(f"{file.name}.{os.getpid()}")  # readers never see half a file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"key": dict(key), "value": dict(value)}), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        return f"{folder} can't be written ({error.strerror or error}): set ANYATTN_CACHE_DIR"
    return None
