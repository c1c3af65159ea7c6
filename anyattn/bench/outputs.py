"""Where results go: refused before anything is measured, if nothing can be written there."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from anyattn.errors import ConfigError

__all__ = ["check_file", "check_folder_or_file", "check_plot", "write_text"]


def check_file(option: str, path: str | Path) -> None:
    """Raises `ConfigError` unless `path` is a file, or can be one."""
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise _refused(option, path, "a folder")
    if not folder.is_dir():
        raise _refused(option, path, f"no folder {folder}")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise _refused(option, path, "no permission to write")


def check_folder_or_file(option: str, path: str) -> None:
    """As `check_file`, but a folder is fine, and made where the path ends with `/`.

    Raises:
        ConfigError: neither a folder nor a file.
    """
    if not path.endswith("/") and not Path(path).is_dir():
        check_file(option, path)
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(option, path, error.strerror or str(error)) from error
    check_file(option, Path(path) / "table.json")


def check_plot(path: str) -> None:
    """As `check_file`; and matplotlib for other files than .svg."""
    if Path(path).suffix.lower() != ".svg" and find_spec("matplotlib") is None:
        hint = "name it .svg, or pip install matplotlib"
        raise ConfigError("--plot", asked=path, allowed="a file .svg", hint=hint)
    check_file("--plot", path)


def write_text(option: str, path: str | Path, text: str) -> None:
    """Raises `ConfigError` if the file can't be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(option, path, error.strerror or str(error)) from error


def _refused(option: str, path: str | Path, why: str) -> ConfigError:
    allowed, hint = "a file in a folder that is there", f"give {option} a path that can be written"
    return ConfigError(f"{option} can't be written", asked=f"{path}: {why}", allowed=allowed, hint=hint)
