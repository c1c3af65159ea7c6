"""The example vendor package as if installed in a folder, whole or broken on purpose."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

__all__ = ["EXAMPLE", "call", "install", "points"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "vendor_package"


def install(
    folder: Path, edits: Mapping[str, tuple[str, str]] | None = None, *, name: str = "anyattn-lumen"
) -> Path:
    """`folder` with the package and its metadata; `edits`: file -> (text, what stands there instead)."""
    shutil.copytree(EXAMPLE / "src", folder, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for file, (old, new) in (edits or {}).items():
        path = folder / "anyattn_lumen" / file
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(header, encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def points(folder: Path) -> list[EntryPoint]:
    """The entry points of the one distribution in `folder`."""
    (info,) = folder.glob("*.dist-info")
    return [*Distribution.at(info).entry_points]


def call(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command line of anyattn in a process that has `folder` on its path."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ANYATTN_")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "anyattn.cli.main", *command],
        env={**inherited, "PYTHONPATH": path, **environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
