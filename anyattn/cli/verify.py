"""Prove a backend on this machine: cases from what it declares, judged in float64, and broken on purpose.

Exit code 1 if anything fails; each failure prints the line that runs it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyattn.testing.checks import Subject
    from anyattn.testing.kit import Result
    from anyattn.testing.plan import KitPlan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn verify`."""
    parser.add_argument("backend", help="torch_native, triton, … (`anyattn backends` lists them)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small shapes, a minute on one core (default)")
    size.add_argument("--full", action="store_true", help="shapes of real models, thousands of cases")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the drawn cases (default: 0)")
    parser.add_argument("--device", help="torch device (default: the accelerator, else the CPU)")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="a stand-in for its library, on the CPU: proves the calls only",
    )
    parser.add_argument("--assume", metavar="HOST", help="with --emulated: a chip, such as cuda:sm100")
    parser.add_argument(
        "--latent",
        action="store_true",
        help="latent models (MLA); a backend that serves no others needs no asking",
    )
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="capture and replay whatever is declared for graphs (--cases: replays of each)",
    )
    parser.add_argument("--cases", type=int, metavar="N", help="cases of a full run (default: 4000)")
    parser.add_argument("--random", type=int, metavar="N", help="N random cases in place of the plan")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: 1, --full: the cores)")
    parser.add_argument("--write", metavar="FILE", help="put the worst errors into this Markdown table")
    parser.add_argument("--case", metavar="CASE", help="run one case, as a failure prints it")
    parser.add_argument("--check", metavar="NAME", help="with --case: what to check (default: numbers)")
    parser.add_argument(
        "--mutants", action="store_true", help="break the code on purpose: does the kit notice?"
    )


def run(args: argparse.Namespace) -> int:
    """Plan, run, report.

    Raises:
        UnknownNameError: a backend, check or device nobody knows. ConfigError: options that can't be.
        SelectionError: the backend doesn't serve this machine.
    """
    from anyattn.cli.verify_checks import check_options
    from anyattn.cli.verify_graphs import verify_graphs
    from anyattn.cli.verify_latent import serves_latents_alone, verify_latents
    from anyattn.testing.subject import default_device, needs_interpreter

    check_options(args)
    device = args.device or ("cpu" if args.emulated else default_device())
    if (
        not args.emulated
        and needs_interpreter(args.backend, device)
        and os.environ.get("TRITON_INTERPRET") != "1"
    ):
        return _again_interpreted(args, device)
    if args.graphs:
        return verify_graphs(args, device)
    host = args.assume or (_emulated_host(args) if args.emulated else None)
    if args.latent or serves_latents_alone(args.backend, device, host):
        return verify_latents(args, device, host)
    if args.mutants:
        return _mutants(args, device)
    if args.case is not None:
        return _one_case(args, device)
    return _whole(args, device)


def _again_interpreted(args: argparse.Namespace, device: str) -> int:
    """Triton reads the variable when kernels are decorated: a process of its own has it from the start."""
    command = [sys.executable, "-m", "anyattn.cli.main", "verify", args.backend, "--device", device]
    command += ["--seed", str(args.seed)]
    for name in ("quick", "full", "mutants", "latent", "graphs", "json"):
        command += [f"--{name}"] if getattr(args, name) else []
    for name in ("cases", "random", "workers", "write", "case", "check"):
        value = getattr(args, name)
        command += [] if value is None else [f"--{name}", str(value)]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environ, check=False).returncode


def _emulated_host(args: argparse.Namespace) -> str:
    from anyattn import api
    from anyattn.testing.emulators import emulator_of

    return emulator_of(api.registry().get(args.backend).name, latent=args.latent).host


def _open(args: argparse.Namespace, device: str) -> Subject:
    from anyattn.testing.subject import open_subject

    return open_subject(args.backend, device, emulated=args.emulated, host=args.assume)


def _whole(args: argparse.Namespace, device: str) -> int:
    from anyattn.cli.verify_checks import check_dense
    from anyattn.testing import report
    from anyattn.testing.kit import summarise
    from anyattn.testing.plan import plan_kit, plan_random

    check_dense(args)
    begin = time.perf_counter()
    subject = _open(args, device)
    if args.random is None:
        plan = plan_kit(subject.declared, seed=args.seed, full=args.full, count=args.cases)
    else:
        plan = plan_random(subject.declared, args.random, seed=args.seed, full=args.full)
    results = _run(args, subject, plan)
    summary = summarise(subject.declared.name, plan, results, time.perf_counter() - begin)
    host = report.host_of(subject.declared, device)
    if args.write:
        path = Path(args.write)
        old = path.read_text() if path.exists() else ""
        path.write_text(report.merge_table(old, summary, host))
    if args.json:
        print(json.dumps(report.document(summary, plan, host, args.seed), indent=2))
    else:
        print(report.text(summary, plan, host))
    return 1 if summary.failed else 0


def _run(args: argparse.Namespace, subject: Subject, plan: KitPlan) -> list[Result]:
    from anyattn.testing.kit import run_items
    from anyattn.testing.pool import run_in_workers

    default = (os.cpu_count() or 1) if args.full else 1
    workers = default if args.workers is None else args.workers
    count, failed = 0, 0

    def done(result: Result) -> None:
        nonlocal count, failed
        count, failed = count + 1, failed + (result.why is not None)
        if result.why is not None:
            about = f"FAILED {result.item.check}, {result.item.name}: {result.why}"
            print(f"{about}\n  {result.item.case!r}", file=sys.stderr, flush=True)
        if count % 200 == 0:
            print(f"{count} of {len(plan.items)}, {failed} failed", file=sys.stderr, flush=True)

    if workers > 1:
        return run_in_workers(
            plan.items, args.backend, subject.where, workers, done, None if subject.named else subject.host
        )
    return run_items(plan.items, subject, done)


def _one_case(args: argparse.Namespace, device: str) -> int:
    from anyattn.testing.cases import parse_case
    from anyattn.testing.kit import run_items
    from anyattn.testing.plan import Item

    subject = _open(args, device)
    item = Item(args.check or "numbers", parse_case(args.case), "given")
    refusal = subject.declared.refusal(item.case)
    (result,) = run_items([item], subject)
    verdict = "passed" if result.passed else "skipped" if result.skipped else "failed"
    why = result.why or result.skipped or ""
    if args.json:
        print(json.dumps({"verdict": verdict, "error": result.error, "why": why, "undeclared": refusal}))
    else:
        note = f" (not declared: {refusal})" if refusal else ""
        print(f"{verdict}, error {result.error:.3g}{note} {why}".rstrip())
    return 1 if result.why else 0


def _mutants(args: argparse.Namespace, device: str) -> int:
    from anyattn.testing.mutants.hunt import hunt, hunt_text

    found = hunt(_open(args, device))
    if args.json:
        print(json.dumps([caught.to_json() for caught in found], indent=2))
    else:
        print(hunt_text(found))
    return 0 if all(caught.caught for caught in found) else 1
