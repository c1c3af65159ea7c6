"""Can a library that compiles its kernels at first use do so here: compiler, tools, a folder to write to.

Nothing is run or written. A library that has compiled kernels at hand needs no compiler, and isn't held up
by the lack of one. Read in FlashInfer 0.7.2 (`flashinfer/jit/env.py`, `cpp_ext.py`, `core.py`) and Triton
3.7.1 (`triton/runtime/build.py`, `cache.py`, `knobs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from anyattn.core.facts import BuildBlock, BuildFault, LibraryFacts
from anyattn.detect.distributions import locate
from anyattn.detect.known import KNOWN
from anyattn.detect.sources import Sources

__all__ = ["BUILDERS", "TOOLKITS", "with_builds"]

TOOLKITS: Mapping[str, tuple[int, int]] = {
    "sm100": (12, 8),
    "sm103": (12, 9),
    "sm110": (13, 0),
    "sm120": (12, 8),
    "sm121": (12, 9),
}
"""Chip -> the oldest CUDA toolkit whose nvcc compiles for it; older chips take any that FlashInfer takes."""


@dataclass(frozen=True)
class _Machine:
    """What a rule may look at."""

    arch: str
    sources: Sources
    libraries: Mapping[str, LibraryFacts]

    def env(self, name: str) -> str | None:
        return self.sources.environ.get(name) or None

    def program(self, *names: str) -> Path | None:
        """The first of `names` (file names or paths) that can be run."""
        return next((found for name in names if (found := self.sources.program(name))), None)

    @property
    def home(self) -> Path:
        return Path(self.env("HOME") or Path("~").expanduser())


def with_builds(
    libraries: Mapping[str, LibraryFacts], platform: str, arch: str, sources: Sources
) -> dict[str, LibraryFacts]:
    """`libraries` with a `block` on each that compiles kernels for `platform` and can't do so here."""
    machine = _Machine(arch, sources, libraries)
    return {
        name: replace(facts, block=BUILDERS[name](facts, machine))
        if name in BUILDERS and platform in KNOWN[name].platforms
        else facts
        for name, facts in libraries.items()
    }


def _cache_block(folder: Path, machine: _Machine, variable: str, writes: str) -> BuildBlock | None:
    if machine.sources.writable(folder):
        return None
    return BuildBlock(
        BuildFault.CACHE,
        f"{folder}, where {writes}, can't be written",
        f"set {variable} to a folder that can be",
    )


# -- FlashInfer ------------------------------------------------------------------------------------------


def _flashinfer(facts: LibraryFacts, machine: _Machine) -> BuildBlock | None:
    base = Path(machine.env("FLASHINFER_WORKSPACE_BASE") or machine.home)
    cache = base / ".cache" / "flashinfer"
    # Importing it makes this folder and a log in it, compiled kernels or not.
    block = _cache_block(cache, machine, "FLASHINFER_WORKSPACE_BASE", "FlashInfer keeps its kernels")
    if block or _shipped(facts, machine):
        return block
    if machine.env("FLASHINFER_DISABLE_JIT"):
        return BuildBlock(
            BuildFault.DISABLED,
            "FLASHINFER_DISABLE_JIT is set and no compiled kernels are installed",
            "unset it, or install flashinfer-jit-cache of the same version",
        )
    if any(cache.glob(f"{facts.version}/*/cached_ops/*/*.so")):
        return None
    return _toolchain(machine)


def _shipped(facts: LibraryFacts, machine: _Machine) -> bool:
    """Compiled kernels came with it: a jit-cache of the same version, or a build ahead of time."""
    ready = machine.libraries.get("flashinfer-jit-cache")
    if ready and ready.version and ready.version.partition("+")[0] == facts.version:
        return True
    package = locate("flashinfer", machine.sources.path)
    return package is not None and any((package.parent / "data" / "aot").glob("*/*.so"))


def _toolchain(machine: _Machine) -> BuildBlock | None:
    home = _cuda_home(machine)
    nvcc = home and machine.program(machine.env("FLASHINFER_NVCC") or str(home / "bin" / "nvcc"))
    if home is None or nvcc is None:
        where = f"none in {home}" if home else "none on PATH, no CUDA_HOME"
        return BuildBlock(
            BuildFault.NO_COMPILER,
            f"no nvcc ({where})",
            "install the CUDA toolkit and set CUDA_HOME, or flashinfer-jit-cache of the same version",
        )
    have, need = _toolkit(home), TOOLKITS.get(machine.arch)
    if have and need and have < need:
        return BuildBlock(
            BuildFault.OLD_COMPILER,
            f"nvcc of CUDA {have[0]}.{have[1]} can't compile for {machine.arch}",
            f"install a CUDA toolkit >= {need[0]}.{need[1]} and point CUDA_HOME to it",
        )
    if machine.program("ninja") is None:
        return BuildBlock(
            BuildFault.NO_TOOL, "no ninja on PATH", "pip install ninja, and put its folder on PATH"
        )
    cxx = machine.env("CXX") or "c++"
    if machine.program(cxx) is None:
        return BuildBlock(BuildFault.NO_TOOL, f"no C++ compiler ({cxx})", "install g++, or set CXX")
    return None


def _cuda_home(machine: _Machine) -> Path | None:
    """FlashInfer's order: CUDA_HOME, CUDA_PATH, the nvcc on PATH, the usual folder."""
    named = machine.env("CUDA_HOME") or machine.env("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = machine.program("nvcc")
    if nvcc:
        return nvcc.parent.parent
    usual = machine.sources.at("/usr/local/cuda")
    return usual if usual.exists() else None


def _toolkit(home: Path) -> tuple[int, int] | None:
    """Version of a toolkit by its header (`CUDART_VERSION 12090`); None where there is none to read."""
    try:
        text = (home / "include" / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return (int(match.group(1)) // 1000, int(match.group(1)) % 1000 // 10) if match else None


# -- Triton ----------------------------------------------------------------------------------------------


def _triton(facts: LibraryFacts, machine: _Machine) -> BuildBlock | None:
    home = Path(machine.env("TRITON_HOME") or machine.home)
    cache = Path(machine.env("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    block = _cache_block(cache, machine, "TRITON_CACHE_DIR", "Triton keeps its kernels")
    if block or any(cache.glob("*/*.so")):
        return block
    named = machine.env("CC")
    if machine.program(*((named,) if named else ("gcc", "clang"))) is None:
        return BuildBlock(
            BuildFault.NO_COMPILER,
            f"no C compiler ({named or 'gcc, clang'}) for Triton's launcher",
            "install gcc, or set CC",
        )
    return None


BUILDERS: Mapping[str, Callable[[LibraryFacts, _Machine], BuildBlock | None]] = {
    "flashinfer-python": _flashinfer,
    "triton": _triton,
}
"""Distribution -> the rule that says what stops it from compiling here."""
