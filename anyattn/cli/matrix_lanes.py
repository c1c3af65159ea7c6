"""Lanes of the CI as data: `ci/lanes.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anyattn.core.capabilities import BackendRecord, ModelKind
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["KINDS", "Lane", "lanes_table", "load_lanes"]

KINDS = ("device", "emulate", "compile", "run")
"""On the chip; on stand-ins; for chips that aren't there; commands as they are written."""

_KITS = ("", "quick", "full")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One job. See `ci/lanes.toml` for the fields."""

    name: str
    kind: str
    chips: tuple[str, ...]
    runner: tuple[str, ...]
    hosted: bool = False
    image: str = ""
    install: tuple[str, ...] = ()
    kit: str = ""
    backends: tuple[str, ...] = ()
    latents: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    tried: str = ""
    note: str = ""

    @property
    def title(self) -> str:
        """Name and chips."""
        return f"{self.name} ({', '.join(self.chips)})"

    @property
    def records(self) -> bool:
        """It writes results."""
        return self.kind != "run"

    def script(self) -> tuple[str, ...]:
        """Shell lines: each backend runs, whichever failed before; results lie in `results/`."""
        if not self.records:
            return self.commands
        lines = ["mkdir -p results", "status=0"]
        if self.kind == "compile":
            lines.append(f"{_CLI} verify-compile --json > results/{self.name}.json || status=1")
        option = " --emulated" if self.kind == "emulate" else ""
        kit = f" --{self.kit}" if self.kit else ""
        for latent, names in (("", self.backends), (" --latent", self.latents)):
            for name in names if self.kind != "compile" else ():
                file = f"results/{self.name}-{name}{'-mla' if latent else ''}.json"
                lines.append(f"{_CLI} verify {name}{latent}{kit}{option} --json > {file} || status=1")
        record = (
            f'{_CLI} matrix record results/*.json --date "$(date -u +%F)" --commit "$(git rev-parse HEAD)"'
        )
        return (*lines, f"{record} || status=1", "exit $status")


_CLI = ".venv/bin/anyattn"


def load_lanes(path: Path, records: Sequence[BackendRecord], targets: Sequence[str]) -> tuple[Lane, ...]:
    """The lanes of a file.

    Raises:
        ConfigError: a file that can't be read, a field that isn't one, a lane that can't be.
        UnknownNameError: a backend, chip, kind or kit nobody knows.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        hint = "run it in a checkout of the project, or give --root"
        raise ConfigError("lanes can't be read", asked=f"{path}: {error}", hint=hint) from error
    lanes = tuple(_lane(entry) for entry in data.get("lane", ()))
    names = [lane.name for lane in lanes]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError("lanes of one name", asked=", ".join(double), allowed="a name for each")
    for lane in lanes:
        _check(lane, {record.name: record for record in records}, targets)
    return lanes


def _lane(entry: Mapping[str, Any]) -> Lane:
    known = {f.name for f in fields(Lane)}
    for name in entry:
        if name not in known:
            raise UnknownNameError(f"field of lane {entry.get('name', '?')}", name, known)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    try:
        return Lane(**values)
    except TypeError as error:
        raise ConfigError(
            f"lane {entry.get('name', '?')}",
            asked=str(error),
            allowed="name, kind, chips and runner at least",
        ) from error


def _check(lane: Lane, records: Mapping[str, BackendRecord], targets: Sequence[str]) -> None:
    for value, allowed, what in ((lane.kind, KINDS, "kind"), (lane.kit, _KITS, "kit")):
        if value not in allowed:
            raise UnknownNameError(f"{what} of lane {lane.name}", value, allowed)
    for chip in lane.chips:
        if chip not in targets:
            raise UnknownNameError(f"chip of lane {lane.name}", chip, targets)
    for names, kind in ((lane.backends, ModelKind.DENSE), (lane.latents, ModelKind.MLA)):
        for name in names:
            if name not in records:
                raise UnknownNameError(f"backend of lane {lane.name}", name, records)
            rows = [row for row in records[name].rows if kind in row.kinds]
            if kind not in records[name].targets or not any(
                row.serves(c) for row in rows for c in lane.chips
            ):
                raise ConfigError(
                    f"lane {lane.name} expects what can't be",
                    asked=f"{name} for {kind.value} models on {', '.join(lane.chips)}",
                    allowed="backends with an adapter and rows for such a chip",
                    hint=f"`anyattn backends --assume {lane.chips[0]}`",
                )


def lanes_table(lanes: Sequence[Lane]) -> list[str]:
    """One line a lane, in Markdown."""
    lines = ["| lane | what | chips | where | backends | tried |", "| --- | --- | --- | --- | --- | --- |"]
    for lane in lanes:
        what = lane.kind if lane.kind != "run" else lane.note
        kit = f", {lane.kit} kit" if lane.kit else ""
        own = [*lane.backends, *(f"{name} (latent)" for name in lane.latents)]
        where = ", ".join(lane.runner) + (f" in {lane.image}" if lane.image else "")
        cells = (lane.name, what + kit, ", ".join(lane.chips), where, ", ".join(own), lane.tried or "never")
        lines.append(f"| {' | '.join(cells)} |")
    return lines
