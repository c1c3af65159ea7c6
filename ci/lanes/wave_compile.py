"""The templates that `wave` calls, compiled for chips that aren't there: no AMD device, no ROCm.

    python -m venv ENV && ENV/bin/pip install wave-lang==3.9.1 "torch==2.13.0+cpu" numpy packaging
    ENV/bin/python ci/lanes/wave_compile.py [--chips gfx942,gfx950] [--json RESULT.json]

The adapter's own `Compiler` builds them with its own options: they are the kernels that it would launch. All
but the last step is real: where Wave would load the code object into a GPU, its header is read instead (the
chip that it is for) and what its notes say of registers, spills and shared memory. Nothing is run: nothing is
said about numbers. One line a template and chip; exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from anyattn.backends.rocm.wave_kernels import Compiler, Shape

CHIPS = ("gfx942", "gfx950")
MACHINES = {0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}
"""`EF_AMDGPU_MACH` of an AMDGPU code object: https://llvm.org/docs/AMDGPUUsage.html (ELF header)."""
NOTES = {
    "VGPRs": b".vgpr_count",
    "AGPRs": b".agpr_count",
    "spills": b".vgpr_spill_count",
    "scratch": b".private_segment_fixed_size",
    "LDS": b".group_segment_fixed_size",
}
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = (
    (32, 8, 128, BF16, 0.0),
    (32, 8, 128, FP16, 30.0),
    (16, 2, 64, BF16, 0.0),
    (8, 8, 80, FP16, 0.0),
    (28, 4, 128, BF16, 0.0),
    (32, 2, 256, BF16, 0.0),
    (24, 1, 128, FP16, 0.0),
)
"""Query heads, key heads, head size, type, cap: each group and head size of the catalog's rows once."""
EXTENDS = {"groups": (1, 4, 8), "sizes": (64, 80, 128)}
"""What the catalog's extend rows take; other shapes are compiled for decode alone."""

Job = tuple[str, Callable[[], Any]]


class Unloaded:
    """In the place of `WaveKernel`: keeps the code object's path."""

    def __init__(self, options: Any, vmfb: Any, asm: str, binary: str, *rest: Any, **more: Any) -> None:
        """As Wave constructs its own."""
        self.binary = Path(binary)


def jobs(compiler: Compiler) -> Iterator[Job]:
    """Names, and what compiles them. Decode gives two kernels."""
    for heads, own, size, dtype, cap in SHAPES:
        # A scale of its own: the default of the templates would hide one that isn't passed on.
        shape = Shape(heads, own, size, size, dtype, 0.1, cap)
        name = f"{heads}/{own} heads of {size}, {str(dtype).removeprefix('torch.')}{', capped' * bool(cap)}"
        yield f"decode, {name}", lambda s=shape: compiler.decode(s)  # type: ignore[misc]
        if heads // own in EXTENDS["groups"] and size in EXTENDS["sizes"]:
            yield f"extend to 128, {name}", lambda s=shape: (compiler.extend(s, 128),)  # type: ignore[misc]
            yield f"extend, {name}", lambda s=shape: (compiler.extend(s, 129),)  # type: ignore[misc]


def described(binary: bytes) -> tuple[str, dict[str, int]]:
    """Chip and resources of a code object: its ELF flags, and counts in its MessagePack notes."""
    if binary[:4] != b"\x7fELF":
        return "no ELF file", {}
    machine = int.from_bytes(binary[48:52], "little") & 0xFF
    found = {
        name: number(binary, binary.find(key) + len(key)) for name, key in NOTES.items() if key in binary
    }
    return MACHINES.get(machine, hex(machine)), found


def number(data: bytes, at: int) -> int:
    """An unsigned integer of MessagePack."""
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(data[at], 0)
    return int.from_bytes(data[at + 1 : at + 1 + size], "big") if size else data[at]


def compiled(chip: str) -> list[dict[str, Any]]:
    """Every template for a chip, printed one by one."""
    os.environ["WAVE_DEFAULT_ARCH"] = chip  # read by `set_default_run_config`, each time
    module = importlib.import_module("wave_lang.kernel.wave.compile")
    module.WaveKernel = Unloaded  # type: ignore[attr-defined]
    found = []
    for name, build in jobs(Compiler()):
        start = time.perf_counter()
        try:
            parts = [described(kernel.binary.read_bytes()) for kernel in build()]
            ok = all(target == chip for target, _ in parts)
            text = "; ".join(f"for {target}: {told(counts)}" for target, counts in parts)
        except Exception as error:  # compilers raise anything
            lines = str(error).splitlines() or [""]
            ok, text = False, f"{type(error).__name__}: {lines[0][:200]}"
        took = f"{time.perf_counter() - start:.0f} s"
        print(f"{chip:7} {name:48} {'ok' if ok else 'FAILED'}  {took}  {text}", flush=True)
        found.append({"entry": name, "target": chip, "ok": ok})
    return found


def told(counts: dict[str, int]) -> str:
    """Counts in words."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default=",".join(CHIPS), help="also gfx90a")
    parser.add_argument("--json", type=Path, help="a document that `anyattn matrix record` takes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WAVE_CACHE_DIR"] = folder  # read when Wave is imported: nothing older is taken
        found = [entry for chip in args.chips.split(",") for entry in compiled(chip)]
    names = ("wave-lang", "iree-base-compiler", "torch")
    versions = {name: importlib.metadata.version(name) for name in names}
    if args.json:
        document = {"backend": "wave", "versions": versions, "configurations": found}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    right = sum(entry["ok"] for entry in found)
    print(f"{', '.join(f'{n} {v}' for n, v in versions.items())}: {right} of {len(found)} compiled")
    return 0 if found and right == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
