"""A measured table: median times by bucket and backend, with where they come from. JSON both ways.

{"schema": "anyattn.measured/2", "device", "arch", "units", "versions", "date", "commit", "command",
 "entries": [{"bucket": {…}, "times": {"triton": [seconds, spread], …}}, …]}

An entry that was kept from an older run has "date", "commit" and "command" of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anyattn.core.measure.bucket import Bucket
from anyattn.core.measure.versions import differing
from anyattn.errors import ConfigError

__all__ = [
    "READABLE",
    "SCHEMA",
    "MeasuredTable",
    "Origin",
    "Provenance",
    "Timing",
    "load_table",
    "merge_tables",
]

SCHEMA = "anyattn.measured/2"
READABLE = (SCHEMA, "anyattn.measured/1")
"""Schemas that are read. Version 1 called roles phases and had no mixed steps."""


@dataclass(frozen=True)
class Timing:
    """Median seconds of a call, and its spread: interquartile range over median (0.03 = 3 %)."""

    seconds: float
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and 0 <= self.spread < math.inf):
            asked = f"{self.seconds} s, spread {self.spread}"
            raise ConfigError("a measured time", asked=asked, allowed="seconds > 0, spread >= 0")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where times come from.

    Attributes:
        device: its name. arch: `platform:arch`. units: SMs, CUs or CPU cores, where known.
        versions: distribution -> version, of torch, Triton, this package and the kernel libraries.
        date: YYYY-MM-DD. commit, command: what ran.
    """

    device: str
    arch: str
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    command: str = ""
    units: int | None = None


@dataclass(frozen=True)
class Origin:
    """The run of an entry that was kept when a later one was merged: as in `Provenance`."""

    date: str = ""
    commit: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in vars(self).values()):
            raise TypeError("date, commit and command of an entry are texts")


Times = Mapping[str, Timing]
"""Backend -> time, of one bucket."""


@dataclass(frozen=True)
class MeasuredTable:
    """Times of one device. `name` stands for it in texts: the file's, without its folder and ending.

    Date, commit and command of `provenance` are those of all buckets that `kept` doesn't have.
    """

    provenance: Provenance
    entries: Mapping[Bucket, Times]
    name: str = "unsaved"
    kept: Mapping[Bucket, Origin] = field(default_factory=dict)

    def origin(self, bucket: Bucket) -> Origin:
        """The run that timed a bucket."""
        own = self.provenance
        return self.kept.get(bucket) or Origin(own.date, own.commit, own.command)

    def backends(self) -> tuple[str, ...]:
        """Everybody who has a time, in order of appearance."""
        return tuple(dict.fromkeys(name for times in self.entries.values() for name in times))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        own = {k: v for k, v in vars(self.provenance).items() if v is not None}
        entries = [
            {"bucket": bucket.to_json(), "times": {n: [t.seconds, t.spread] for n, t in times.items()}}
            | (vars(self.kept[bucket]) if bucket in self.kept else {})
            for bucket, times in self.entries.items()
        ]
        return {"schema": SCHEMA, **own, "versions": dict(self.provenance.versions), "entries": entries}

    @staticmethod
    def from_json(data: Any, name: str = "unsaved") -> MeasuredTable:
        """The table that `to_json` wrote, in this version or the one before.

        Raises:
            ConfigError: another schema, or fields that don't fit.
        """
        schema = data.get("schema") if isinstance(data, Mapping) else f"a {type(data).__name__}"
        if schema not in READABLE:
            hint = "make one: anyattn bench --from RESULT.json --write TABLE.json"
            allowed = " or ".join(READABLE)
            raise ConfigError("schema of a measured table", asked=repr(schema), allowed=allowed, hint=hint)
        try:
            own = {k: v for k, v in data.items() if k not in ("schema", "entries")}
            entries = {Bucket.from_json(e["bucket"]): _times(e["times"]) for e in data["entries"]}
            origins = {Bucket.from_json(e["bucket"]): _origin(e) for e in data["entries"]}
            kept = {bucket: origin for bucket, origin in origins.items() if origin is not None}
            return MeasuredTable(_checked(Provenance(**own)), entries, name, kept)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            asked = f"{name}: {type(error).__name__}: {error}"
            hint = "write it again: anyattn bench --from RESULT.json --write TABLE.json"
            raise ConfigError(
                "fields of a measured table", asked=asked, allowed="as saved", hint=hint
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON, an entry a line, so that a changed time is a diff of one line.

        Raises:
            ConfigError: the file can't be written.
        """
        data = self.to_json()
        lines = ",\n  ".join(json.dumps(e) for e in data.pop("entries"))
        head = json.dumps(data, indent=1).removesuffix("\n}")
        try:
            Path(path).write_text(f'{head},\n "entries": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        except OSError as error:
            raise ConfigError("a measured table can't be written", asked=f"{path}: {error}") from error


def _checked(made: Provenance) -> Provenance:
    """Raises TypeError for fields of another type."""
    texts = (made.device, made.arch, made.date, made.commit, made.command)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("device, arch, date, commit and command are texts")
    if not (made.units is None or isinstance(made.units, int)):
        raise TypeError(f"units = {made.units!r}, no whole number")
    if not all(isinstance(text, str) for pair in made.versions.items() for text in pair):
        raise TypeError("versions are texts by distribution")
    return made


def _times(data: Mapping[str, Sequence[float]]) -> Times:
    return {str(name): Timing(float(seconds), float(spread)) for name, (seconds, spread) in data.items()}


def _origin(entry: Mapping[str, Any]) -> Origin | None:
    told = {name: entry[name] for name in ("date", "commit", "command") if name in entry}
    return Origin(**told) if told else None


def load_table(path: str | Path) -> MeasuredTable:
    """The table in a file.

    Raises:
        ConfigError: it can't be read, isn't JSON, or no table.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "name a file that `anyattn bench --write` made; ANYATTN_MEASUREMENTS=none ranks without any"
        raise ConfigError("measured table can't be read", asked=f"{path}: {error}", hint=hint) from error
    return MeasuredTable.from_json(data, Path(path).stem)


def merge_tables(older: MeasuredTable, newer: MeasuredTable) -> MeasuredTable:
    """Both tables' buckets; where both have one, the newer's: times of two runs don't compare.

    Date, commit and command are the newer's; buckets that only the older has keep theirs.

    Raises:
        ConfigError: other devices, or other versions (major.minor) of a library.
    """
    a, b = older.provenance, newer.provenance
    if (a.device, a.arch) != (b.device, b.arch):
        asked = f"{a.device} ({a.arch}) and {b.device} ({b.arch})"
        hint = "write to another file, or to a folder: its files are named by the device"
        raise ConfigError("tables of two devices don't merge", asked=asked, allowed="one device", hint=hint)
    changed = differing(a.versions, b.versions)
    if changed:
        told = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
        hint = "replace the table, or measure the missing cells again"
        raise ConfigError("tables of two versions don't merge", asked=told, allowed="equal", hint=hint)
    where = replace(b, versions={**a.versions, **b.versions})
    kept = {bucket: older.origin(bucket) for bucket in older.entries if bucket not in newer.entries}
    return MeasuredTable(where, {**older.entries, **newer.entries}, newer.name, {**kept, **newer.kept})


def combined(cells: Iterable[Times]) -> Times:
    """One entry from several cells of a bucket: geometric means of the backends that all cells timed.

    Where fewer than two are common, the cell with most backends stands for all.
    """
    found = list(cells)
    common = [name for name in found[0] if all(name in cell for cell in found)]
    if len(common) < 2:
        found = [max(found, key=len)]
        common = list(found[0])
    return {name: _mean([cell[name] for cell in found]) for name in common}


def _mean(timings: Sequence[Timing]) -> Timing:
    """Rounded to six digits: more would only fill the file."""
    product = 1.0
    for timing in timings:
        product *= timing.seconds ** (1 / len(timings))
    return Timing(float(f"{product:.6g}"), round(max(t.spread for t in timings), 4))
