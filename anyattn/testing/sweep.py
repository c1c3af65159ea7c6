"""A sweep: many random cases on one backend and device, with the worst error of every dtype and mode.

python -m anyattn.testing.sweep --backend triton --device cuda --cases 2000 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from anyattn.testing.cases import Case, CaseSpace, random_case
from anyattn.testing.judge import check_case

__all__ = ["SPACES", "Outcome", "main", "sweep"]

_HEADS = ((32, 8), (8, 1), (9, 3), (4, 4), (28, 4), (16, 2), (64, 1), (72, 1))
_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128), (64, 32))
_FLOAT32 = (("float32", "float32"),)
_HALVES = (("bfloat16", "bfloat16"), ("float16", "float16"))
_FP8 = (
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
    ("float32", "float8_e4m3fn"),
)
_SMALL = CaseSpace(heads=_HEADS, head_dims=_DIMS, kv_scales=(1.0, 0.5, 2.0), scales_per_head=True)

SPACES: dict[str, CaseSpace] = {
    "float32": dataclasses.replace(_SMALL, dtypes=_FLOAT32),
    "half": dataclasses.replace(_SMALL, dtypes=_HALVES),
    "fp8": dataclasses.replace(_SMALL, dtypes=_FP8),
    "wide": dataclasses.replace(
        _SMALL,
        dtypes=(*_FLOAT32, *_HALVES),
        kinds=("causal",),
        windows=(None, None, 64, 100, 1024),
        max_requests=8,
        max_context=2000,
        max_extend=70,
    ),
    "batch": dataclasses.replace(
        _SMALL,
        dtypes=_HALVES,
        kinds=("causal",),
        modes=("decode", "mixed"),
        heads=((8, 2), (4, 1)),
        head_dims=((64, 64), (128, 128)),
        max_requests=200,
        max_context=300,
        max_extend=8,
    ),
}
"""Named families of cases; a sweep takes them in turns."""


@dataclass
class Outcome:
    """What a sweep found; `worst` maps `dtype/KV dtype/mode` to the largest error."""

    cases: int = 0
    passed: int = 0
    failed: list[dict[str, str]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def _cases(seed: int, count: int, names: Sequence[str]) -> Iterator[Case]:
    for index in range(count):
        name = names[index % len(names)]
        yield random_case(random.Random(f"{name}/{seed}/{index}"), SPACES[name])


def sweep(backend: str, device: str, count: int, seed: int, names: Sequence[str]) -> Outcome:
    """Judge `count` cases of the named spaces; progress on stderr."""
    outcome, start = Outcome(), time.perf_counter()
    for case in _cases(seed, count, names):
        outcome.cases += 1
        try:
            report = check_case(case, backend=backend, device=device)
        except Exception as error:  # a crash is a failed case, and the sweep goes on
            where = traceback.format_exc().strip().splitlines()[-3:]
            outcome.failed.append({"case": repr(case), "why": f"{type(error).__name__}: {error}; {where}"})
            continue
        key = f"{case.dtype}/{case.kv_dtype}/{case.mode}"
        outcome.worst[key] = max(outcome.worst.get(key, 0.0), report.error)
        if report.passed:
            outcome.passed += 1
        else:
            outcome.failed.append({"case": repr(case), "why": str(report)})
        if outcome.cases % 200 == 0:
            print(f"{outcome.cases} cases, {len(outcome.failed)} failed", file=sys.stderr, flush=True)
    outcome.seconds = time.perf_counter() - start
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="torch_native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spaces", default=",".join(SPACES))
    args = parser.parse_args(argv)
    outcome = sweep(args.backend, args.device, args.cases, args.seed, args.spaces.split(","))
    data = dataclasses.asdict(outcome)
    print(json.dumps({**data, "failed": data["failed"][:20], "failures": len(data["failed"])}, indent=1))
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
