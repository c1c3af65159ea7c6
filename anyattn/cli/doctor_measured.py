"""Measured tables of this architecture, as `anyattn doctor` lists them: which count here, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anyattn.core.facts import HostFacts
from anyattn.core.measure.table import MeasuredTable
from anyattn.core.measure.use import TableUse
from anyattn.core.measure.versions import differing

__all__ = ["measured_lines", "measured_tables"]


def measured_tables(host: HostFacts, environ: Mapping[str, str] | None = None) -> tuple[TableUse, ...]:
    """A line for each table that ships for this architecture, or that the environment names.

    `used` says that its times count on this machine, but for backends whose library is another version.

    Raises:
        ConfigError: `ANYATTN_MEASUREMENTS` names what can't be read.
    """
    from anyattn.core.measure.shipped import tables_for

    return tuple(_status(table, host) for table in tables_for(host.target, environ))


def _status(table: MeasuredTable, host: HostFacts) -> TableUse:
    from anyattn.core.select.measured import mismatch

    made = table.provenance
    why = mismatch(table, host)
    here = {name: lib.version for name, lib in host.libraries.items() if lib.version} | _torch(host)
    changed = "" if why else _changed(made.versions, here)
    return TableUse(
        table.name, made.device, made.arch, made.versions, made.date, made.commit, made.command,
        used=not why, reason=why or changed,
    )  # fmt: skip


def _torch(host: HostFacts) -> dict[str, str]:
    return {} if host.torch is None else {"torch": host.torch}


def _changed(then: Mapping[str, str], here: Mapping[str, str]) -> str:
    told = [f"{name} {old} (here {new})" for name, (old, new) in differing(then, here).items()]
    return f"measured with {', '.join(told)}: backends that run on these are not ranked by it" if told else ""


def measured_lines(tables: Iterable[TableUse]) -> list[str]:
    """As text."""
    lines = []
    for table in tables:
        state = "counts" if table.used else "unused"
        lines.append(f"  {state:<10}{table.table:<38} {table.device}, {table.date}, commit {table.commit}")
        lines += [f"            {table.reason}"] if table.reason else []
    return lines
