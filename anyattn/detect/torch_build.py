"""torch's version and build, read as text: importing torch may raise, and takes a second when it doesn't."""

from __future__ import annotations

import re
from dataclasses import dataclass

from anyattn.detect.distributions import find, locate
from anyattn.detect.sources import Sources

__all__ = ["TorchBuild", "read_torch"]

_FIELD = re.compile(r"^(__version__|cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_LOCAL = re.compile(r"\+(cpu|xpu|cu(\d+)(\d)|rocm(\d+\.\d+))")


@dataclass(frozen=True)
class TorchBuild:
    """Version of the distribution and what it was built for.

    `build` is `cuda 13.0`, `rocm 7.0`, `xpu …` or `cpu`; None when nothing tells. `stray` is a module
    called torch that no distribution installed.
    """

    version: str | None = None
    build: str | None = None
    note: str | None = None
    stray: bool = False


def read_torch(sources: Sources) -> TorchBuild:
    """What the torch on `sources.path` is. Never imports it."""
    installed = find("torch", sources.path)
    module = locate("torch", sources.path)
    if installed is None and module is None:
        return TorchBuild(note="torch isn't installed")
    fields = {}
    if module is not None:
        try:
            text = (module.parent / "version.py").read_text(encoding="utf-8", errors="replace")
            fields = dict(_FIELD.findall(text)) | {"read": text}
        except OSError:
            pass
    version = (installed.version if installed else None) or fields.get("__version__")
    note = None if installed else f"a module torch without a distribution is at {module}"
    return TorchBuild(version, _build(fields) or _from_local(version or ""), note, installed is None)


def _build(fields: dict[str, str]) -> str | None:
    if "read" not in fields:
        return None
    if "cuda" in fields:
        return f"cuda {fields['cuda']}"
    if "hip" in fields:
        return f"rocm {'.'.join(fields['hip'].split('.')[:2])}"
    return f"xpu {fields['xpu']}" if "xpu" in fields else "cpu"


def _from_local(version: str) -> str | None:
    """`2.13.0+cu130` -> `cuda 13.0`."""
    match = _LOCAL.search(version)
    if match is None:
        return None
    if match.group(2):
        return f"cuda {match.group(2)}.{match.group(3)}"
    return f"rocm {match.group(4)}" if match.group(4) else match.group(1)
