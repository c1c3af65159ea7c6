"""The CI as data: lanes, pipelines from them, and tables of what is proven where, from results.

    anyattn matrix                                   the lanes
    anyattn matrix --format github                   a pipeline from them (github, gitlab, buildkite)
    anyattn matrix record RESULT.json --date 2026-11-29 --commit 0123abc
                                                     keep a summary of a result, write everything anew
    anyattn matrix update                            write the workflow, ci/*.csv, docs/{support,matrix}.md
    anyattn matrix check                             say what is stale; exit code 1 if anything is

A cell that got weaker or went away, and a default that changed, are written with --reason alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from anyattn.cli.matrix_decisions import (
    changed_defaults,
    decisions_page,
    defaults,
    defaults_csv,
    read_defaults,
)
from anyattn.cli.matrix_lanes import Lane, lanes_table, load_lanes
from anyattn.cli.matrix_results import load_results, read_document, summarise, write_result
from anyattn.cli.matrix_support import cells_of, lost_cells, read_csv, support_page, to_csv
from anyattn.cli.matrix_workflows import FORMATS, github
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["add_arguments", "generated", "lanes_of", "losses", "run", "stale"]

LANES, RESULTS, CHANGES = Path("ci/lanes.toml"), Path("ci/results"), Path("ci/changes.csv")
SUPPORT, DEFAULTS, WORKFLOW = (
    Path("ci/support.csv"),
    Path("ci/defaults.csv"),
    Path(".github/workflows/lanes.yml"),
)

Change = tuple[str, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn matrix`."""
    parser.add_argument(
        "action",
        nargs="?",
        default="lanes",
        metavar="ACTION",
        help="lanes (default), record, update or check",
    )
    parser.add_argument(
        "results", nargs="*", type=Path, metavar="RESULT", help="with record: JSON of a command"
    )
    parser.add_argument("--format", choices=tuple(FORMATS), help="print the lanes as a pipeline")
    parser.add_argument("--date", help="with record: day of the run, YYYY-MM-DD")
    parser.add_argument("--commit", help="with record: what ran")
    parser.add_argument("--note", default="", help="with record: what else there is to say of the run")
    parser.add_argument("--reason", default="", help="why a cell was lost or a default changed")
    parser.add_argument(
        "--root", type=Path, default=Path(), metavar="FOLDER", help="of the checkout (default: .)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 1: something is stale, or lost without a reason.

    Raises:
        UnknownNameError: an action, backend or chip nobody knows. ConfigError: data that can't be.
    """
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "lanes": _lanes,
        "record": _record,
        "update": _update,
        "check": _check,
    }
    if args.action not in actions:
        raise UnknownNameError("action of anyattn matrix", args.action, actions)
    if args.results and args.action != "record":
        raise ConfigError("results", asked=str(args.results[0]), allowed="with `anyattn matrix record` alone")
    return actions[args.action](args)


def lanes_of(root: Path) -> tuple[Lane, ...]:
    """The lanes of a checkout. Raises as `load_lanes`."""
    from anyattn.detect import plugins

    return load_lanes(root / LANES, plugins().records, plugins().targets)


def generated(root: Path) -> dict[Path, str]:
    """Everything that is written from data: path under `root` -> text."""
    from anyattn.catalog import records

    lanes, cells, rows = lanes_of(root), cells_of(records(), load_results(root / RESULTS)), defaults()
    page = [
        "# The matrix: lanes, and what is chosen where",
        "",
        "<!-- Written by `anyattn matrix update` from ci/lanes.toml and the catalog. -->",
        "",
        "What each chip has been proven with is in [support.md](support.md). It comes from results alone,",
        "kept as small summaries in `ci/results`. To add one, put what `anyattn verify … --json` or",
        "`anyattn verify-compile --json` prints into a file, and record it:",
        "",
        "    anyattn matrix record RESULT.json --date 2026-11-29 --commit 0123abc",
        "",
        "That writes the summary and all that follows from it. A cell that got weaker or went away, and a",
        "default that changed, are refused without `--reason`; reasons are kept in `ci/changes.csv`.",
        "",
        "## Lanes",
        "",
        '`ci/lanes.toml` as a table. "tried" is the day when a lane last ran by exactly these lines; "never"',
        "says that its image and install lines are a proposal.",
        "",
        *lanes_table(lanes),
        "",
        "## Defaults",
        "",
        "What is chosen unasked on each simulated host, with the libraries recorded for it",
        "(`ci/defaults.csv`). Whether it was ever run there is another matter: [support.md](support.md).",
        decisions_page(rows),
        "",
    ]
    return {
        SUPPORT: to_csv(cells),
        Path("docs/support.md"): support_page(cells),
        DEFAULTS: defaults_csv(rows),
        Path("docs/matrix.md"): "\n".join(page),
        WORKFLOW: github(lanes),
    }


def stale(root: Path, wanted: dict[Path, str]) -> tuple[Path, ...]:
    """Paths whose text isn't the wanted one."""
    return tuple(path for path, text in wanted.items() if _text(root / path) != text)


def losses(root: Path, wanted: dict[Path, str]) -> tuple[Change, ...]:
    """Cells that got weaker or went away, and defaults that changed: (what, before, after)."""
    cells = lost_cells(read_csv(_text(root / SUPPORT)), read_csv(wanted[SUPPORT]))
    changed = changed_defaults(read_defaults(_text(root / DEFAULTS)), read_defaults(wanted[DEFAULTS]))
    return (*cells, *changed)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _lanes(args: argparse.Namespace) -> int:
    lanes = lanes_of(args.root)
    if args.format:
        print(FORMATS[args.format](lanes), end="")
    elif args.json:
        print(json.dumps([asdict(lane) | {"script": lane.script()} for lane in lanes], indent=2))
    else:
        print("\n".join(lanes_table(lanes)))
    return 0


def _record(args: argparse.Namespace) -> int:
    if not args.results or not args.date or not args.commit:
        raise ConfigError(
            "a record without all that it says",
            asked="anyattn matrix record",
            allowed="RESULT.json … --date YYYY-MM-DD --commit HASH",
            hint="`anyattn verify triton --json > RESULT.json` makes a result",
        )
    found = [read_document(path) for path in args.results]
    said = {"date": args.date, "commit": args.commit, "note": args.note}
    made = [each for document in found for each in summarise(document, **said)]
    for each in made:
        print(f"written: {write_result(each, args.root / RESULTS).relative_to(args.root)}")
    return _update(args)


def _update(args: argparse.Namespace) -> int:
    wanted = generated(args.root)
    lost, reason = losses(args.root, wanted), args.reason.strip()
    if lost and not reason:
        for what, before, after in lost:
            print(f"{what}: {before} -> {after}", file=sys.stderr)
        print("Nothing written but results. Say why: --reason '…'", file=sys.stderr)
        return 1
    if lost:
        _append(args.root / CHANGES, lost, reason)
    for path in stale(args.root, wanted):
        (args.root / path).parent.mkdir(parents=True, exist_ok=True)
        (args.root / path).write_text(wanted[path], encoding="utf-8")
        print(f"written: {path}")
    return 0


def _append(path: Path, lost: tuple[Change, ...], reason: str) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if not path.exists():
        writer.writerow(("what", "before", "after", "reason"))
    writer.writerows((*change, reason) for change in lost)
    path.write_text(_text(path) + out.getvalue(), encoding="utf-8")


def _check(args: argparse.Namespace) -> int:
    wanted = generated(args.root)
    old, lost = stale(args.root, wanted), losses(args.root, wanted)
    if args.json:
        print(json.dumps({"stale": [str(path) for path in old], "lost": lost}, indent=2))
    else:
        print("\n".join(f"stale: {path}" for path in old) or "everything is current")
        for what, before, after in lost:
            print(f"{what}: {before} -> {after}")
    return 1 if old else 0
