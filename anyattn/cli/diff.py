"""What changed between two measurements, decisions or machines.

    anyattn diff old.json new.json                            two measured tables or two bench results
    anyattn diff old.json new.json --fail-on-regression 5     exit 1 if a backend lost more than 5 %
    anyattn diff here.json there.json                         two of `anyattn select --json`
    anyattn diff monday.json tuesday.json --fail-on-change    two of `anyattn doctor --json`

Differences of times within the noise of both sides (their spread, 2 % at least) are not shown.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyattn.cli.diff_records import decision_changes, host_changes
from anyattn.core.measure.diff import TimesDiff, cell_times, diff_times
from anyattn.core.measure.from_bench import BENCH_SCHEMA
from anyattn.core.measure.table import READABLE, MeasuredTable, Times, Timing
from anyattn.core.select.codec import to_plain
from anyattn.errors import ConfigError

__all__ = ["Diff", "add_arguments", "diff_files", "run"]

_KINDS = {
    "table": "a measured table (anyattn bench --write)",
    "bench": "a bench result (anyattn bench --json)",
    "decision": "a decision (anyattn select --json)",
    "host": "a machine (anyattn doctor --json, or host facts)",
}
_HINT = "check the path, or write the file with one of these commands"
_LONGEST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn diff`."""
    parser.add_argument("old", metavar="OLD", help="a JSON file")
    parser.add_argument("new", metavar="NEW", help="a JSON file of the same kind")
    parser.add_argument(
        "--fail-on-regression",
        type=float,
        metavar="PCT",
        help="exit 1 if a backend became slower by more than PCT percent in a cell, beyond the noise, or has "
        "no time there any more",
    )
    parser.add_argument(
        "--fail-on-change",
        action="store_true",
        help="exit 1 if a winner, a choice, a verdict or a version changed",
    )
    parser.add_argument("--all", action="store_true", help=f"all lines, not the {_LONGEST} largest changes")


def run(args: argparse.Namespace) -> int:
    """Print the difference. 1 where an option asks to fail on it.

    Raises:
        ConfigError: files that can't be read or compared.
    """
    found = diff_files(args.old, args.new)
    limit = args.fail_on_regression
    if limit is not None and (found.times is None or not 0 <= limit < math.inf):
        allowed = "two measured tables or bench results, and a percentage >= 0"
        asked = f"{limit:g} for two {found.kind} files"
        raise ConfigError("--fail-on-regression", asked=asked, allowed=allowed, hint="--fail-on-change")
    if limit is not None and found.times is not None and not found.times.means:
        asked = f"{found.times.cells} cells in both, no backend in both"
        hint = "measure the same cells and backends, or leave --fail-on-regression out"
        raise ConfigError("--fail-on-regression has nothing to compare", asked=asked, hint=hint)
    watched = found.times if limit is not None else None
    worse = watched.regressions(limit) if watched is not None and limit is not None else ()
    gone = watched.gone if watched is not None else ()
    if args.json:
        print(json.dumps(found.to_json() | {"regressions": to_plain(worse)}, indent=2))
    else:
        print("\n".join(_lines(found, None if args.all else _LONGEST)))
        if limit is not None:
            print(f"{len(worse)} regressions of more than {limit:g} %, {len(gone)} times gone")
    return int(bool(worse or gone) or (args.fail_on_change and found.changed))


@dataclass(frozen=True)
class Diff:
    """The difference of two files: facts that changed (what -> old, new), and times where both have some.

    Libraries that were called directly are `peers`: they win no cell and regress nothing.
    """

    kind: str
    facts: Mapping[str, tuple[Any, Any]]
    times: TimesDiff | None = None
    sources: tuple[str, str] = ("", "")
    peers: TimesDiff | None = None

    @property
    def changed(self) -> bool:
        """A winner or a fact changed, or a backend has no time any more; dates and commits are no facts."""
        return bool(self.facts) or bool(self.times and (self.times.winners or self.times.gone))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = [{"what": what, "old": old, "new": new} for what, (old, new) in self.facts.items()]
        head = {"schema": "anyattn.diff/1", "kind": self.kind, "old": self.sources[0], "new": self.sources[1]}
        times = {"times": to_plain(self.times), "peers": to_plain(self.peers)}
        return head | {"changed": self.changed, "facts": facts} | times


def diff_files(old: str | Path, new: str | Path) -> Diff:
    """The difference of two JSON files of one kind.

    Raises:
        ConfigError: files that can't be read, of no known kind, or of two kinds.
    """
    (kind, a), (other, b) = _read(old), _read(new)
    if kind != other:
        asked = f"{old}: {_KINDS[kind]}; {new}: {_KINDS[other]}"
        hint = "give two files that the same command wrote"
        raise ConfigError("files of two kinds", asked=asked, allowed="two of one kind", hint=hint)
    names = str(old), str(new)
    try:
        if kind == "decision":
            return Diff(kind, decision_changes(a, b), None, names)
        if kind == "host":
            return Diff(kind, host_changes(a, b), None, names)
        times = diff_times(_cells(kind, a, names[0]), _cells(kind, b, names[1]))
        peers = diff_times(_peers(kind, a), _peers(kind, b))
        return Diff(kind, _measured_facts(a, b), times, names, peers)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        asked = f"{old}, {new}: {type(error).__name__}: {error}"
        raise ConfigError(f"fields of {_KINDS[kind]}", asked=asked, allowed="as it was written") from error


def _read(path: str | Path) -> tuple[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = "; ".join(_KINDS.values())
        raise ConfigError(
            "a file to compare can't be read", asked=f"{path}: {error}", allowed=allowed, hint=_HINT
        ) from error
    found = data if isinstance(data, dict) else {}
    schemas = dict.fromkeys(READABLE, "table") | {BENCH_SCHEMA: "bench"}
    kind = schemas.get(str(found.get("schema")))
    if kind is None and {"candidates", "kv", "host"} <= set(found):
        kind = "decision"
    if kind is None and ("machine" in found or {"platform", "arch"} <= set(found)):
        kind = "host"
    if kind is None:
        asked = f"{path}: schema {found.get('schema')!r}"
        allowed = "; ".join(_KINDS.values())
        raise ConfigError("a file to compare", asked=asked, allowed=allowed, hint=_HINT)
    return kind, data


def _cells(kind: str, data: Any, name: str) -> Mapping[str, Times]:
    if kind == "table":
        return cell_times(MeasuredTable.from_json(data, name).entries)
    return _of_kind(data, "backend")


def _peers(kind: str, data: Any) -> Mapping[str, Times]:
    return _of_kind(data, "peer") if kind == "bench" else {}


def _of_kind(data: Any, kind: str) -> Mapping[str, Times]:
    found = {}
    if not isinstance(data["cells"], list):
        raise TypeError("cells is no list")
    for entry in data["cells"]:
        cell, results = entry["cell"], [r for r in entry["results"] if r["kind"] == kind]
        name = cell.get("name") or json.dumps(cell, sort_keys=True)
        times = {str(r["name"]): Timing(float(r["median_s"]), float(r["spread"])) for r in results}
        if times:
            found[f"{name} {entry['mode']}"] = times
    return found


def _measured_facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found = {name: (a.get(name), b.get(name)) for name in ("device", "arch", "units")}
    for name in {**a["versions"], **b["versions"]}:
        found[f"version of {name}"] = (a["versions"].get(name), b["versions"].get(name))
    return {what: pair for what, pair in found.items() if pair[0] != pair[1]}


def _lines(found: Diff, limit: int | None) -> Iterator[str]:
    yield f"{found.sources[0]} -> {found.sources[1]}"
    for what, (old, new) in found.facts.items():
        yield f"  {what}: {_shown(old)} -> {_shown(new)}"
    if found.times is not None:
        lost, added = len(found.times.lost), len(found.times.added)
        yield f"  {found.times.cells} cells in both; {lost} lost, {added} added"
        yield from _mean_lines(found.times, "")
        yield from _mean_lines(found.peers, " (peer)")
        yield from _time_lines(found.times, limit)
    elif not found.facts:
        yield "  no difference"


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _mean_lines(times: TimesDiff | None, mark: str) -> Iterator[str]:
    for name, mean in times.means.items() if times is not None else ():
        word = "unchanged" if not (mean.faster or mean.slower) else "slower" if mean.slower else "faster"
        yield (
            f"  {name + mark:28} {mean.ratio:.3f} x its time ({mean.lowest:.2f} to {mean.highest:.2f}) over "
            f"{mean.buckets} cells: {word}"
        )


def _time_lines(times: TimesDiff, limit: int | None) -> Iterator[str]:
    for winner in sorted(times.winners, key=lambda w: w.ratio)[:limit]:
        yield f"  winner of {winner.cell}: {winner.old} -> {winner.new} ({winner.ratio:.3f} of its time)"
    for cell, backend in times.gone[:limit]:
        yield f"  gone    {backend} in {cell}"
    changes = sorted(times.times, key=lambda c: -max(c.ratio, 1 / c.ratio))
    for change in changes[:limit]:
        yield f"  {change.ratio:6.3f} x  {change.backend} in {change.cell} (noise {change.noise:.0%})"
    if limit is not None and len(changes) > limit:
        yield f"  … and {len(changes) - limit} more (--all)"
