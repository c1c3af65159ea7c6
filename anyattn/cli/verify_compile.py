"""Compile the package's Triton kernels for chips that aren't there: registers, spills, shared memory.

Exit code 1 if a configuration doesn't compile, asks for more shared memory than its chip has, spills
without a stated reason, has dots without matrix instructions, or reads K and V one by one. Nothing runs on a
device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyattn.bench.outputs import check_file
from anyattn.cli.compile_table import markdown, outcome
from anyattn.errors import ConfigError, LibraryError, UnknownNameError

if TYPE_CHECKING:
    from anyattn.kernels.triton.aot import Entry
    from anyattn.kernels.triton.aot_pool import Job
    from anyattn.kernels.triton.aot_report import Report

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn verify-compile`."""
    parser.add_argument(
        "--target",
        action="append",
        metavar="ARCH",
        help="sm_90, gfx942, …; repeatable (default: the main eleven)",
    )
    parser.add_argument(
        "--entry", action="append", metavar="NAME", help="an entry, or a prefix of several; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="print the entries and their targets only")
    parser.add_argument("--write", metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=240.0, metavar="SECONDS", help="for one compilation (default: 240)"
    )
    parser.add_argument("--configs", metavar="MODULE:NAME", help="another list of entries than the package's")


def run(args: argparse.Namespace) -> int:
    """Compile, report, judge.

    Raises:
        ConfigError: TRITON_INTERPRET is set, no worker is allowed, or the table can't be written.
        LibraryError: Triton isn't installed.
        UnknownNameError: an entry or target that isn't listed.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError(
            "interpreted kernels can't be compiled", asked="TRITON_INTERPRET=1", hint="unset TRITON_INTERPRET"
        )
    if args.workers < 1:
        raise ConfigError("--workers", asked=args.workers, allowed=">= 1")
    if args.write:
        check_file("--write", args.write)
    source, entries = _entries(args.configs)
    jobs = _jobs(entries, args.entry, args.target)
    if args.list:
        _print_list(jobs, as_json=args.json)
        return 0
    begin = time.perf_counter()
    reports = _compile(jobs, source, args)
    seconds = time.perf_counter() - begin
    if args.write:
        Path(args.write).write_text(markdown(reports, _versions(), seconds=seconds, workers=args.workers))
    failed = [report for report in reports if report.problems]
    if args.json:
        print(json.dumps(_document(reports, seconds), indent=2))
    else:
        print(f"{len(reports)} compiled, {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed else 0


def _entries(configs: str | None) -> tuple[str, dict[str, Entry]]:
    try:
        from anyattn.kernels.triton.aot_pool import DEFAULT_LIST, load_entries

        source = configs or DEFAULT_LIST
        return source, load_entries(source)
    except (ImportError, AttributeError) as error:
        raise LibraryError(
            "the list of kernel configurations can't be loaded",
            asked=configs or "the package's",
            hint=f"{error}; Triton comes with `pip install anyattn[portable]`",
        ) from error


def _jobs(
    entries: Mapping[str, Entry], wanted: Iterable[str] | None, targets: Iterable[str] | None
) -> list[Job]:
    """Every chosen entry on every chosen target of its own (those listed by default, if none is chosen)."""
    from anyattn.kernels.triton.aot import ALL_TARGETS, TARGETS
    from anyattn.kernels.triton.aot_pool import Job

    for name in targets or ():
        if name not in ALL_TARGETS:
            raise UnknownNameError("target", name, ALL_TARGETS)
    for name in wanted or ():
        if not any(entry.startswith(name) for entry in entries):
            raise UnknownNameError("entry", name, entries)
    chosen = [e for e in entries.values() if wanted is None or e.name.startswith(tuple(wanted))]
    return [
        Job(entry.name, target.name, entry.kernel or "", target.shared_limit)
        for entry in chosen
        for target in ([ALL_TARGETS[name] for name in targets] if targets else TARGETS.values())
        if target.listed in entry.targets
    ]


def _print_list(jobs: Iterable[Job], *, as_json: bool) -> None:
    listed: dict[str, list[str]] = {}
    for job in jobs:
        listed.setdefault(job.entry, []).append(job.target)
    if as_json:
        print(json.dumps(listed, indent=2))
    else:
        print("\n".join(f"{name}: {' '.join(targets)}" for name, targets in listed.items()))


def _compile(jobs: list[Job], source: str, args: argparse.Namespace) -> list[Report]:
    from anyattn.kernels.triton.aot_pool import compile_all

    def done(report: Report) -> None:
        print(f"{report.entry} {report.target}: {outcome(report)}", file=sys.stderr, flush=True)

    return compile_all(jobs, source=source, workers=args.workers, timeout=args.timeout, done=done)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("triton", "torch")}


def _document(reports: Iterable[Report], seconds: float) -> dict[str, Any]:
    rows = [report.to_json() for report in reports]
    return {
        "schema": 1,
        "versions": _versions(),
        "seconds": round(seconds, 1),
        "ok": all(row["ok"] for row in rows),
        "configurations": rows,
    }
