"""From a bench result to a measured table: `anyattn bench --write TABLE`, `--from FILE` for a saved one."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from anyattn.core.facts import HostFacts
from anyattn.core.measure.from_bench import from_bench
from anyattn.core.measure.shipped import file_name
from anyattn.core.measure.table import MeasuredTable, load_table, merge_tables
from anyattn.errors import ConfigError

__all__ = ["add_write_arguments", "read_result", "table_of", "write_table"]


def add_write_arguments(parser: argparse.ArgumentParser) -> None:
    """`--from`, `--write`, `--merge`."""
    group = parser.add_argument_group("measured table (what `select` ranks by)")
    group.add_argument(
        "--from", dest="saved", metavar="FILE", help="take a saved result instead of measuring"
    )
    group.add_argument(
        "--write",
        metavar="TABLE",
        help="write the measured table of the result there (in a folder: by the name of the device)",
    )
    group.add_argument(
        "--merge", action="store_true", help="keep what TABLE has for buckets that weren't measured now"
    )


def read_result(path: str | Path) -> Any:
    """The JSON of a saved result.

    Raises:
        ConfigError: the file can't be read, or isn't JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "write one with `anyattn bench --out FILE`"
        raise ConfigError("a bench result can't be read", asked=f"{path}: {error}", hint=hint) from error


def table_of(result: Any, *, facts: HostFacts | None = None, command: str = "") -> MeasuredTable:
    """The table of a result.

    Args:
        facts: of the host that measured, where that is this one; fills in what the result doesn't say.

    Raises:
        ConfigError: as `from_bench`, or a result without `platform:arch`.
    """
    arch = facts.target if facts is not None else _arch(str(result.get("arch", "")))
    units = facts.num_units if facts is not None else None
    table = from_bench(result, arch=arch, command=command, units=units)
    told = replace(table.provenance, command=_without_folders(table.provenance.command))
    return replace(table, provenance=told)


def _without_folders(command: str) -> str:
    """Files by their names alone: a table is for others, whose folders are theirs."""
    parts = command.split()
    return " ".join(part.rpartition("/")[2] if part[:1] in "/~." else part for part in parts)


def _arch(text: str) -> str:
    """`platform:arch` of a bare architecture, by its family's prefix."""
    families = {"sm": "cuda", "gfx": "rocm", "avx": "cpu", "amx": "cpu", "arm": "cpu", "generic": "cpu"}
    found = next((platform for prefix, platform in families.items() if text.startswith(prefix)), None)
    if ":" in text:
        return text
    if found is None:
        hint = "write it into the result's field arch"
        raise ConfigError(
            "arch of a bench result", asked=repr(text), allowed="platform:arch, as cuda:sm90", hint=hint
        )
    return f"{found}:{text}"


def write_table(
    result: Any, path: str | Path, *, merge: bool = False, facts: HostFacts | None = None, command: str = ""
) -> tuple[MeasuredTable, Path]:
    """Write a result's table; the table as written, and where. A folder gets a file named by the device.

    Args:
        merge: keep the buckets of a table that is there already, of the same device and versions.

    Raises:
        ConfigError: as `table_of` and `merge_tables`, or a file that can't be written.
    """
    from anyattn.bench.outputs import check_folder_or_file

    table = table_of(result, facts=facts, command=command)
    target = Path(path)
    if target.is_dir() or str(path).endswith("/"):
        check_folder_or_file("--write", str(path))
        target = target / file_name(table.provenance)
    if merge and target.exists():
        table = merge_tables(load_table(target), table)
    table.save(target)
    return replace(table, name=target.stem), target
