"""The result as JSON (`anyattn.bench/1`): what others read, and what a run goes on from."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import anyattn
from anyattn.api import host_facts
from anyattn.bench.cells import Cell
from anyattn.bench.engine import Timed, rates
from anyattn.bench.fields import check_fields
from anyattn.bench.harness.limits import MachineLimits
from anyattn.bench.harness.report import device_name, versions
from anyattn.errors import ConfigError

__all__ = ["SCHEMA", "add", "check_resumable", "limits_json", "load", "new_document", "save", "skipped_cell"]

SCHEMA = "anyattn.bench/1"

Document = dict[str, Any]

_MEASURE = "write one with `anyattn bench --json FILE`"


def new_document(device: torch.device, commit: str | None = None) -> Document:
    """A result without cells: device, versions of everything that timings depend on, date, commit."""
    facts = host_facts(str(device))
    libraries = {name: lib.version for name, lib in facts.libraries.items() if lib.version}
    return {
        "schema": SCHEMA,
        "device": facts.device_name or device_name(device),
        "arch": facts.target,
        "units": facts.num_units,
        "versions": libraries | versions() | {"anyattn": anyattn.__version__},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": _commit() if commit is None else commit,
        "command": shlex.join(["anyattn", *map(_without_folder, sys.argv[1:])]),
        "threads": torch.get_num_threads(),
        "limits": {},
        "cells": [],
        "left_out": [],
    }


def _without_folder(argument: str) -> str:
    """Where files lie is no part of a command that others repeat."""
    return os.path.basename(argument) if os.path.isabs(argument) else argument


def _commit() -> str:
    """Of the checkout that this file lies in; empty outside of one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def limits_json(limits: MachineLimits) -> dict[str, Any]:
    """What the machine can do: GB/s of a copy (read + written) and of a read, TFLOP/s of a product."""
    return {
        "copy_gb_s": limits.copy_gb_per_s,
        "read_gb_s": limits.read_gb_per_s,
        "gemm_tflop_s": limits.gemm_tflop_per_s,
        "dtype": limits.dtype,
    }


def add(document: Document, timed: Timed) -> None:
    """A cell in one mode."""
    cell, limits = timed.cell, document["limits"]
    results = [
        {
            "name": contender.name,
            "kind": contender.kind,
            "counts": contender.counts,
            "median_s": result.median,
            "best_s": min(result.seconds),
            "spread": result.spread / 100.0,
            "rounds": len(result.seconds),
            **rates(cell, result, limits),
            "error": error,
            "page": page,
            "layout": layout,
        }
        for contender, result, error, (page, layout) in timed.results
    ]
    document["cells"].append({
        "cell": cell.to_json(),
        "mode": timed.mode,
        "copies": timed.copies,
        "choice": timed.choice,
        "results": results,
        "skipped": [{"name": name, "why": why} for name, why in timed.skipped],
    })  # fmt: skip


def skipped_cell(document: Document, cell: Cell, why: str) -> None:
    """A cell that nobody was timed in."""
    for mode in cell.modes:
        add(document, Timed(cell, mode, 0, None, skipped=[("every contender", why)]))


def save(document: Mapping[str, Any], path: str | Path) -> None:
    """Write it; a reader never sees half of a file.

    Raises:
        ConfigError: it can't be written.
    """
    target = Path(path)
    part = target.parent / f"{target.name}.part"
    try:
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(part, target)
    except OSError as error:
        allowed, hint = "a file in a folder that is there", "give a path that can be written"
        raise ConfigError(
            "the result can't be written", asked=f"{path}: {error}", allowed=allowed, hint=hint
        ) from error


def load(path: str | Path) -> Document:
    """A result that was saved.

    Raises:
        ConfigError: no such file, not a result, or fields that don't fit.
    """
    try:
        found: Document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        allowed = "what `anyattn bench --json FILE` wrote"
        raise ConfigError(
            "a bench result can't be read", asked=f"{path}: {error}", allowed=allowed, hint=_MEASURE
        ) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise ConfigError("schema of a bench result", asked=repr(schema), allowed=SCHEMA, hint=_MEASURE)
    check_fields(found, str(path))
    return found


def check_resumable(document: Mapping[str, Any], device: torch.device) -> None:
    """Raises `ConfigError` if a result is of another machine or of other versions than a new one here."""
    here = new_document(device, commit="")
    for name in ("device", "arch", "versions"):
        if document[name] != here[name]:
            then, now = (_told(d[name], other[name]) for d, other in ((document, here), (here, document)))
            hint = "give another --json FILE, or leave --resume out"
            which = "other versions" if name == "versions" else f"another {name}"
            raise ConfigError(f"--resume: the result is of {which}", asked=then, allowed=now, hint=hint)


def _told(value: Any, other: Any) -> str:
    """Of versions only those that differ."""
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{k} {v}" for k, v in value.items() if other.get(k) != v) or "nothing more"
