"""Time attention on this machine: every usable backend, beside the libraries called directly.

Each cell of the grid is built, judged against float32 and timed in interleaved rounds, under graphs and
eagerly, with the machine's limits measured in the same run. The result is a table, and JSON with --json FILE;
--write makes the measured table of it that selection reads.

    anyattn bench --quick                        a few minutes of the most telling cells
    anyattn bench --minutes 6 --json out.json    the worthiest cells first, for six minutes
    anyattn bench --device cpu
    anyattn bench --growth                       what preparing a step costs as batch and context grow
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.cli.bench_checks import check_admitted, check_options, strangers
from anyattn.cli.bench_write import add_write_arguments
from anyattn.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from anyattn.bench.cells import Cell
    from anyattn.bench.engine import Options

__all__ = ["add_arguments", "device_of", "run"]

_LOST = 3
_ROUNDS = 5
_BUILDERS = 8
_NOT_KEPT = "nothing is kept without --json FILE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn bench`."""
    which = parser.add_argument_group("which cells")
    which.add_argument("--device", help="torch device (default: the GPU, else the CPU)")
    which.add_argument(
        "--workloads", metavar="A,B", type=_names, default=(), help="decode, prefill, extend, …"
    )
    which.add_argument(
        "--cells", metavar="A,B", type=_names, default=(), help="names, or patterns: decode-64x8k*"
    )
    which.add_argument(
        "--modes", metavar="A,B", type=_names, default=(), help="graph, eager (default: as the grid)"
    )
    which.add_argument("--quick", action="store_true", help="a few telling cells of each workload")
    which.add_argument("--grid", metavar="FILE", help="another grid than the one that ships")
    which.add_argument("--list", action="store_true", help="print the chosen cells only")
    who = parser.add_argument_group("who takes part")
    who.add_argument(
        "--only", metavar="A,B", type=_names, default=(), help="these, by name or pattern: triton,fa3*"
    )
    who.add_argument("--skip", metavar="A,B", type=_names, default=(), help="all but these")
    who.add_argument("--all", action="store_true", help="backends that pass with a reservation, too")
    who.add_argument("--no-peers", action="store_true", help="no libraries called directly")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--minutes", type=float, metavar="M", help="begin no cell after that; the worthiest come first"
    )
    how.add_argument(
        "--rounds", type=int, metavar="N", help="samples of each, in turns (default: 5; --growth: 15)"
    )
    how.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    how.add_argument("--commit", help="what was measured, where git can't tell")
    how.add_argument(
        "--build", type=int, metavar="N", help="compile kernels first, in N processes (outside of --minutes)"
    )
    how.add_argument("--build-only", action="store_true", help="compile kernels, time nothing")
    how.add_argument("--build-here", action="store_true", help=argparse.SUPPRESS)  # one of those processes
    how.add_argument("--resume", action="store_true", help="go on with the result in --json FILE")
    what = parser.add_argument_group("what comes out")
    what.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the result there (none: print it)"
    )
    what.add_argument("--out", dest="json", metavar="FILE", help="the same")
    what.add_argument("--plot", metavar="FILE", help="a roofline: .svg, or .png with matplotlib")
    what.add_argument("--markdown", metavar="FILE", help="tables for a page of documentation")
    what.add_argument("--defaults", action="store_true", help="print policies only: ours, SGLang's, vLLM's")
    what.add_argument("--growth", action="store_true", help="time the preparation of steps instead")
    add_write_arguments(parser)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def run(args: argparse.Namespace) -> int:
    """0 done; 3 if the device failed for good, with what was measured until then.

    Raises:
        ConfigError, UnknownNameError: options that can't be.
        KeyboardInterrupt: Ctrl-C, after a line that says what is saved.
    """
    check_options(args)
    if args.growth:
        from anyattn.cli.bench_growth import run_growth

        return run_growth(args)
    if args.saved:
        from anyattn.bench.document import load

        return _report(args, load(args.saved), measured=False)
    device = device_of(args)
    cells = _cells(args, device)
    if args.list:
        _print_list(cells, args.json)
        return 0
    if not args.build_here:
        check_admitted(cells, device, _options(args, device))
    if args.build_here or args.build_only or args.build:
        _build(args, cells, device)
    return 0 if args.build_here or args.build_only else _measure(args, cells, device)


def device_of(args: argparse.Namespace) -> torch.device:
    """The device that is asked for, with as many threads.

    Raises:
        ConfigError: one that isn't there.
    """
    import torch

    from anyattn.detect.host import detect_host

    if args.threads:
        torch.set_num_threads(args.threads)
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cuda", "cpu"):
        raise ConfigError("--device", asked=name, allowed="cuda, cpu")
    detect_host(name)
    if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", asked=name, allowed="cpu", hint="this torch sees no GPU")
    return torch.device(name)


def _cells(args: argparse.Namespace, device: torch.device) -> list[Cell]:
    from dataclasses import replace

    from anyattn.bench.grid import choose, load_grid

    kind = "cpu" if device.type == "cpu" else "gpu"
    chosen = choose(
        load_grid(kind, args.grid),
        workloads=args.workloads,
        patterns=args.cells,
        quick=args.quick,
        modes=args.modes,
    )
    if args.modes:
        chosen = [replace(c, modes=tuple(m for m in c.modes if m in args.modes)) for c in chosen]
    if not chosen:
        raise ConfigError("no cell is left", asked="--workloads, --cells, --modes and --quick together",
                          hint="`anyattn bench --list` shows all")  # fmt: skip
    return chosen


def _print_list(cells: Sequence[Cell], where: str | None) -> None:
    """As text; as JSON with --json, into its file where one is named."""
    from anyattn.bench.outputs import write_text

    if where is None:
        for cell in cells:
            modes, megabytes = "+".join(cell.modes), cell.stored_bytes / 1e6
            print(f"{cell.worth}  {cell.name:44} {modes:12} {megabytes:8.1f} MB of KV")
        return
    rows = [cell.to_json() | {"modes": cell.modes, "worth": cell.worth} for cell in cells]
    told = json.dumps(rows, indent=1)
    if where == "-":
        print(told)
    else:
        write_text("--json", where, f"{told}\n")


def _options(args: argparse.Namespace, device: torch.device) -> Options:
    from anyattn.bench.engine import Options
    from anyattn.bench.run import to_stderr

    return Options(
        rounds=args.rounds or _ROUNDS, only=args.only, skip=args.skip,
        degraded=args.all or device.type == "cpu",
        peers=not args.no_peers, say=to_stderr,
    )  # fmt: skip


def _build(args: argparse.Namespace, cells: Sequence[Cell], device: torch.device) -> None:
    from anyattn.bench.build import build_all, build_here

    options = _options(args, device)
    if args.build_here:
        build_here(cells, device, options)
        return
    same = [part for part in _without(sys.argv[1:], "--build") if part != "--build-only"]
    build_all(cells, max(1, args.build or _BUILDERS), same, options)


def _measure(args: argparse.Namespace, cells: Sequence[Cell], device: torch.device) -> int:
    from anyattn.bench.document import check_resumable, load
    from anyattn.bench.engine import DeviceLost
    from anyattn.bench.run import Budget, run_cells, to_stderr
    from anyattn.bench.summary import cell_text

    path = None if args.json in (None, "-") else args.json
    known = load(path) if args.resume and path and os.path.exists(path) else None
    if known is not None:
        check_resumable(known, device)
    elif args.resume:
        to_stderr(f"--resume: {path} isn't there, so all cells are timed")
    budget = Budget.of_minutes(args.minutes)
    quiet = args.json == "-" or args.defaults
    told: set[tuple[str, str]] = set()
    try:
        document = run_cells(
            cells, device, _options(args, device),
            budget=budget, path=path, document=known, commit=args.commit,
            show=(lambda _: None) if quiet else lambda entry: print(cell_text(entry, told), flush=True),
        )  # fmt: skip
    except DeviceLost as lost:
        to_stderr(f"the device failed: {lost}")
        return _go_on(args, budget.left) if path else _LOST
    except KeyboardInterrupt:
        to_stderr(f"interrupted: {f'{path} has what was timed; --resume goes on' if path else _NOT_KEPT}")
        raise
    for name in strangers(args, document):
        to_stderr(f"--only {name}: nobody here has that name")
    return _report(args, document, measured=True)


def _go_on(args: argparse.Namespace, seconds: float) -> int:
    """The rest in a new process: a broken context is the process's, not the device's."""
    if seconds <= 0:
        return _LOST
    given = [part for part in _without(sys.argv[1:], "--build") if part != "--resume"] + ["--resume"]
    if args.minutes is not None:
        given += ["--minutes", f"{max(seconds / 60, 0.01):.2f}"]
    sys.stdout.flush()
    return os.execv(sys.executable, [sys.executable, "-m", "anyattn.cli.main", *given])


def _without(arguments: Sequence[str], option: str) -> list[str]:
    """Arguments without an option and its value."""
    at = [i for i, part in enumerate(arguments) if part == option]
    dropped = {*at, *(i + 1 for i in at)}
    return [
        part for i, part in enumerate(arguments) if i not in dropped and not part.startswith(f"{option}=")
    ]


def _report(args: argparse.Namespace, document: dict[str, Any], *, measured: bool) -> int:
    from anyattn.bench.choice import choice_lines, defaults
    from anyattn.bench.document import save
    from anyattn.bench.outputs import write_text
    from anyattn.bench.plot import plot
    from anyattn.bench.summary import cell_text, summary

    if args.json == "-":
        print(json.dumps(document, indent=1))
    elif args.defaults:
        print(defaults(document))
    else:
        if not measured:
            told: set[tuple[str, str]] = set()
            print("\n".join(cell_text(entry, told) for entry in document["cells"]))
        print("\n".join([f"\n{summary(document)}", *choice_lines(document)]))
    if args.json not in (None, "-") and not measured:
        save(document, args.json)
    if args.markdown:
        from anyattn.bench.markdown import markdown

        write_text("--markdown", args.markdown, markdown(document))
    if args.plot:
        plot(document, args.plot)
    if args.write:
        from anyattn.cli.bench_write import write_table

        table, where = write_table(
            document, args.write, merge=args.merge, command=document.get("command", "")
        )
        print(
            f"{len(table.entries)} buckets of {', '.join(table.backends())} written to {where}",
            file=sys.stderr,
        )
    return 0
