"""FlashInfer builds a kernel per variant in 30 to 90 s: the few run on a GPU, built ahead and verified.

    python -m benchmarks.flashinfer_variants list
    python -m benchmarks.flashinfer_variants build --jobs 8     # each in a process of its own, into one cache
    python -m benchmarks.flashinfer_variants verify --count 200 # the kit, on cases that need no other kernel

`FLASHINFER_WORKSPACE_BASE` says where kernels are kept, `MAX_JOBS` how many compilers one build starts (build
sets it to the cores of its share). A case that needs a kernel beyond `VARIANTS` is left out and counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from anyattn.command_line import count, one_line_errors
from anyattn.detect.host import detect_host

if TYPE_CHECKING:
    from anyattn.testing.cases import Case
    from anyattn.testing.plan import Item

__all__ = ["VARIANTS", "Variant", "admitted", "main", "needed", "sample"]


class Variant(NamedTuple):
    """What FlashInfer compiles for. `kernel`: fa2 and fa3 (decode on tensor cores, paged and ragged prefill),
    decode (CUDA cores), sinks (the fa2 sink wrapper)."""

    kernel: str
    head_dim: int
    window: bool = False
    cap: bool = False
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"


_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"

VARIANTS: tuple[Variant, ...] = (
    # The kit's pinned edges and checks stand on the smallest head size.
    *(Variant(kernel, 64) for kernel in ("fa3", "fa2", "decode")),
    *(Variant(kernel, 64, window=True) for kernel in ("fa3", "fa2", "decode")),
    *(Variant(kernel, 64, cap=True) for kernel in ("fa3", "fa2", "decode")),
    Variant("fa2", 64, kv_dtype=_E4M3),
    Variant("sinks", 64),
    Variant("sinks", 64, window=True),
    # What models use.
    Variant("fa3", 128),
    Variant("fa3", 128, window=True),
    Variant("fa2", 128),
    Variant("fa2", 128, kv_dtype=_E4M3),
    Variant("fa2", 128, window=True),
    Variant("fa3", 128, dtype="float16", kv_dtype="float16"),
    Variant("fa2", 256),
    Variant("fa2", 64, kv_dtype=_E5M2),
)  # fmt: skip


def needed(case: Case, host: str | None = None) -> Variant:
    """The kernel that a case's step builds, as the adapter decides it.

    Raises:
        SelectionError: flashinfer doesn't serve the case on this host (or on `host`).
    """
    import anyattn
    from anyattn.backends.cuda.flashinfer_plan import inner_backend, uses_tensor_cores
    from anyattn.core.capabilities import Phase
    from anyattn.core.dtypes import torch_dtype
    from anyattn.core.groups import PlanGroup
    from anyattn.testing.world import case_features

    spec = case.spec()
    decision = anyattn.select(
        [spec], dtype=torch_dtype(case.dtype), kv_dtype=torch_dtype(case.kv_dtype), page_size=case.page_size,
        layout=case.layout, features=case_features(case), backend="flashinfer", host=host,
    )  # fmt: skip
    phases = {"decode": Phase.DECODE, "verify": Phase.VERIFY, "draft_extend": Phase.DRAFT}
    kernel = inner_backend(decision.phase(phases.get(case.mode, Phase.PREFILL)).row)
    types = torch_dtype(case.dtype), torch_dtype(case.kv_dtype)
    if case.sinks:
        kernel = "sinks"
    elif case.mode == "decode" and not uses_tensor_cores(PlanGroup.of(spec), spec.num_q_heads, *types):
        kernel = "decode"
    own = case.kind == "encoder_only"  # attends to k and v as given
    window = case.window is not None and case.mask is None  # a mask holds the window
    kv_dtype = case.dtype if own else case.kv_dtype
    return Variant(kernel, case.head_dim, window, case.logit_cap is not None, case.dtype, kv_dtype)


def sample(variant: Variant) -> Case:
    """A small case that builds `variant`."""
    from anyattn.testing.cases import Case

    decode = variant.kernel in ("fa2", "decode")
    return Case(
        mode="decode" if decode else "extend",
        prefix_lens=(9, 40), extend_lens=(1, 1) if decode else (5, 3), page_size=16,
        num_q_heads=4 if variant.kernel == "decode" else 8, num_kv_heads=2,
        head_dim=variant.head_dim, v_head_dim=variant.head_dim,
        dtype=variant.dtype, kv_dtype=variant.kv_dtype,
        window=17 if variant.window else None, logit_cap=30.0 if variant.cap else None,
        sinks=variant.kernel == "sinks", return_lse=variant.kernel != "sinks",
    )  # fmt: skip


def admitted(items: Sequence[Item], host: str | None = None) -> tuple[list[Item], Counter[Variant]]:
    """Items that need no kernel beyond `VARIANTS`, and how many need each other one."""
    from anyattn.errors import SelectionError

    kept: list[Item] = []
    others: Counter[Variant] = Counter()
    for item in items:
        try:
            variant = needed(item.case, host)
        except SelectionError:  # a check whose own cases differ from the one it is given
            kept.append(item)
            continue
        if variant in VARIANTS:
            kept.append(item)
        else:
            others[variant] += 1
    return kept, others


def _build(environ: dict[str, str], device: str, variant: Variant) -> tuple[Variant, float, str]:
    case = sample(variant)
    command = [sys.executable, "-m", "anyattn.cli.main", "verify", "flashinfer", "--device", device]
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, "--case", repr(case)], env=environ, capture_output=True, text=True, check=False
    )
    words = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()
    return variant, time.perf_counter() - begin, words.splitlines()[-1] if words else "nothing said"


def _builds(jobs: int, device: str) -> Iterator[tuple[Variant, float, str]]:
    share = max(1, (os.cpu_count() or 1) // jobs)
    environ = {**os.environ, "MAX_JOBS": os.environ.get("MAX_JOBS", str(share))}
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(_build, environ, device), VARIANTS)


def _verify(count: int, workers: int, device: str, seed: int) -> int:
    from anyattn.testing.declared import declared
    from anyattn.testing.kit import reproduction
    from anyattn.testing.plan import plan_kit, plan_random
    from anyattn.testing.pool import run_in_workers

    space = declared("flashinfer", device)
    kept, others = admitted(plan_kit(space, seed=seed).items)
    more, beyond = admitted(plan_random(space, 10 * count, seed=seed).items)
    results = run_in_workers([*kept, *more[:count]], "flashinfer", device, workers)
    failed = [r for r in results if r.why is not None]
    for result in failed:
        print(f"FAILED {result.item.label()}\n  {result.why}\n  {reproduction(result, 'flashinfer', device)}")
    left = others + beyond
    passed = sum(r.passed for r in results)
    print(f"{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} skipped")
    print(f"untested: {sum(left.values())} cases drawn need one of {len(left)} other kernels")
    return 1 if failed else 0


@one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything that ran was right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("list", "build", "verify"))
    parser.add_argument("--jobs", type=count, default=4, help="builds at a time")
    parser.add_argument("--count", type=count, default=200, help="random cases beside the kit's own")
    parser.add_argument("--workers", type=count, default=4, help="verifying processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.action == "list":
        print("\n".join(str(variant) for variant in VARIANTS))
        return 0
    detect_host(args.device)  # refuses one that isn't here
    if args.action == "verify":
        return _verify(args.count, args.workers, args.device, args.seed)
    wrong = 0
    for variant, seconds, words in _builds(args.jobs, args.device):
        wrong += not words.startswith("passed")
        print(f"{seconds:6.1f} s  {variant}\n         {words}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
