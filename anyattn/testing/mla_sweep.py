"""Many random latent steps on one backend; prints JSON with failures that run again, and worst errors.

`python -m anyattn.testing.mla_sweep --backend triton --device cuda --cases 300`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from anyattn.command_line import argument, count, one_line_errors
from anyattn.errors import UnknownNameError
from anyattn.testing.emulators import emulator_of, install
from anyattn.testing.mla_cases import MLASpace, random_mla_case
from anyattn.testing.mla_declared import LatentDeclared, latent_declared
from anyattn.testing.mla_judge import check_mla_case

__all__ = ["SPACES", "main", "spaces_of", "sweep"]

_DEEPSEEK = MLASpace(
    sizes=((512, 64, 128, 128),),
    heads=(16, 128),
    pages=(1, 16, 64),
    windows=(None,),
    sinks=(False,),
    kv_sources=("write", "write", "cached"),
    max_context=700,
    max_extend=90,
)

SPACES: dict[str, MLASpace] = {
    "half": dataclasses.replace(_DEEPSEEK, dtypes=(("bfloat16", "bfloat16"), ("float16", "float16"))),
    "fp8": dataclasses.replace(_DEEPSEEK, dtypes=(("bfloat16", "float8_e4m3fn"),), kv_scales=(1.0, 0.5, 2.0)),
    "small": MLASpace(),
}
"""`half` and `fp8` are DeepSeek's sizes; `small` has every feature of the reference."""


def spaces_of(declared: LatentDeclared) -> tuple[str, ...]:
    """The spaces that a backend's rows take anything of."""
    dtypes = {dtype for row in declared.rows for dtype in row.dtypes}
    stored = {dtype for row in declared.rows for dtype in row.kv_dtypes}
    wanted = {"half": "bfloat16" in dtypes, "fp8": "float8_e4m3fn" in stored, "small": "float32" in dtypes}
    return tuple(name for name, takes in wanted.items() if takes)


def sweep(
    backend: str, device: str, count: int, seed: int, spaces: Sequence[str], host: str | None = None,
    workers: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Judge `count` cases of the named spaces, in turns; a crash is a failed case.

    Each is cut down to what the backend declares; where it declares nothing of the kind, it is left out.
    `host`: decided for this emulated host, whose stand-ins are in place. `workers`: processes that share the
    cases on a device; on a CPU, where stand-ins and interpreters are in this process alone, there is one.

    Raises:
        UnknownNameError, SelectionError: as `latent_declared`.
    """
    started, spaces = time.perf_counter(), tuple(spaces)
    workers = 1 if host is not None or torch.device(device).type == "cpu" else max(1, min(workers, count))
    parts = [range(first, count, workers) for first in range(workers)]
    judge = partial(_part, backend, device, seed, spaces, host)
    if workers == 1:
        outcomes = [judge(parts[0])]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            outcomes = list(pool.map(judge, parts))
    names = sorted({name for each in outcomes for name in each["worst"]})
    left_out = sum(each["left_out"] for each in outcomes)
    return {
        "emulated": host is not None,
        "cases": count - left_out,
        "left_out": left_out,
        "passed": sum(each["passed"] for each in outcomes),
        "failed": [failure for each in outcomes for failure in each["failed"]][:20],
        "worst": {name: max(each["worst"].get(name, 0.0) for each in outcomes) for name in names},
        "seconds": round(time.perf_counter() - started, 1),
    }


def _part(
    backend: str, device: str, seed: int, spaces: Sequence[str], host: str | None, numbers: Iterable[int]
) -> dict[str, Any]:
    passed, left_out = 0, 0
    declared = latent_declared(backend, device, host)
    failed: list[dict[str, str]] = []
    worst: dict[str, float] = {}
    for index in numbers:
        name = spaces[index % len(spaces)]
        rng = random.Random(f"{name}/{seed}/{index}")
        case = declared.fitted(random_mla_case(rng, SPACES[name]), rng)
        if case is None:
            left_out += 1
            continue
        try:
            report = check_mla_case(case, backend=backend, device=device, host=host)
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-3:]
            failed.append({"case": repr(case), "why": f"{type(error).__name__}: {error}; {where}"})
            continue
        key = f"{case.dtype}/{case.kv_dtype}/{report.method.value}"
        worst[key] = max(worst.get(key, 0.0), report.error)
        passed += report.passed
        if not report.passed:
            failed.append({"case": repr(case), "why": str(report)})
    return {"left_out": left_out, "passed": passed, "failed": failed, "worst": worst}


@argument
def _spaces(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SPACES:
            raise UnknownNameError("space", name, SPACES)
    return names


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 if a case failed, 2 if none can be run."""
    parser = argparse.ArgumentParser(description="random latent steps, judged by definition")
    parser.add_argument("--backend", default="torch_native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulated", action="store_true", help="a stand-in for the backend's library")
    parser.add_argument("--assume", metavar="HOST", help="with --emulated: another chip than its emulator's")
    parser.add_argument("--cases", type=count, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spaces", type=_spaces, default=("half", "fp8"), help=", ".join(SPACES))
    parser.add_argument("--workers", type=count, default=1, help="processes, on a device")
    args = parser.parse_args(argv)
    host = None
    if args.emulated:
        host = args.assume or emulator_of(args.backend, latent=True).host
        install(args.backend, host, latent=True)
    outcome = sweep(args.backend, args.device, args.cases, args.seed, args.spaces, host, args.workers)
    print(json.dumps(outcome, indent=1))
    return 1 if outcome["failed"] or not outcome["cases"] else 0


if __name__ == "__main__":
    sys.exit(main())
