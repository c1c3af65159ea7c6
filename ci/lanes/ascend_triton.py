"""The package's Triton kernels through triton-ascend, as far as it goes without CANN.

    python ci/lanes/ascend_triton.py record launches.json    where the package's own Triton is installed
    python ci/lanes/ascend_triton.py lower launches.json     where triton-ascend is (and pybind11, numpy)

triton-ascend shares the import name `triton` and has the API of Triton 3.2, so launches are recorded in one
environment (as ahead-of-time compilation does, with the tiles of another chip) and lowered in the other, from
the same kernel files. Lowering runs the stages `ttir` and `ttadapter` (linalg); behind them stands CANN's
compiler, without which nothing is known of tiles, memory or speed. Exit status 1 if a kernel stops earlier.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CHIP = "Ascend910B3"
TILES_OF = "sm_80"
"""The chip whose tiles are taken: nobody has tuned any for Ascend."""


def record(path: Path) -> int:
    """Write every attention launch of ahead-of-time compilation: kernel, argument types, constants."""
    import torch

    from anyattn.kernels.triton import aot
    from anyattn.kernels.triton.configs import aot_attention, aot_mla

    names = {
        torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
        torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8",
    }  # fmt: skip
    found = []
    for entry in (*aot_attention.ENTRIES, *aot_mla.ENTRIES):
        if "fp8" in entry.name or TILES_OF not in entry.targets:
            continue
        launch = aot.record(entry, aot.TARGETS[TILES_OF])
        signature: dict[str, str] = {}
        constants = dict(launch.constexprs)
        for name, value in zip(launch.kernel.arg_names, launch.args, strict=False):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + names[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif value is None or value == 1:
                constants[name] = value
            else:
                signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        found.append(
            {
                "entry": entry.name,
                "kernel": f"{launch.kernel.fn.__module__}:{launch.kernel.fn.__name__}",
                "signature": signature,
                "constants": constants,
            }
        )
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} launches recorded")
    return 0


def lower(path: Path) -> int:
    """Lower each to linalg; one line each, and what triton-ascend's whole `compile` says to the first."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("npu", CHIP, 0)
    launches = json.loads(path.read_text())
    wrong = []
    for launch in launches:
        module, _, name = launch["kernel"].partition(":")
        try:
            kernel = getattr(importlib.import_module(module), name)
            source = ASTSource(kernel, signature=launch["signature"], constants=launch["constants"])
            text = linalg_of(source, make_backend(target))
            print(f"{launch['entry']:42} linalg, {counted(text)}")
        except Exception as error:  # compilers raise anything
            wrong.append(launch["entry"])
            print(f"{launch['entry']:42} {summary(error)}")
    try:
        triton.compile(source, target=target)
        print("whole compilation: done")
    except Exception as error:
        print(f"whole compilation of the last one: {summary(error)}")
    reached = f"{len(launches) - len(wrong)} of {len(launches)}"
    print(f"triton-ascend {triton.__version__}: {reached} reach linalg for {CHIP}")
    return 1 if wrong else 0


def linalg_of(source: Any, backend: Any) -> str:
    """The stages `ttir` and `ttadapter` of a kernel."""
    from triton._C.libtriton import ir

    options = backend.parse_options({"num_warps": 4, "num_stages": 2})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = dict(options.__dict__)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    return str(stages["ttadapter"](stages["ttir"](module, metadata), metadata))


def counted(text: str) -> str:
    """What the hardware will see, by operation."""
    words = ("linalg.matmul", "linalg.reduce", "memref.copy", "scf.for", "tensor.extract", "memref.load")
    return ", ".join(f"{text.count(word)} {word}" for word in words)


def summary(error: Exception) -> str:
    """One line."""
    text = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    told = next((line for line in lines if "not set" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {told.strip()[:220]}"


def main() -> int:
    """Exit status of the phase."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("phase", choices=("record", "lower"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    return record(args.file) if args.phase == "record" else lower(args.file)


if __name__ == "__main__":
    sys.exit(main())
