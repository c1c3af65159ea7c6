"""Options of `anyattn bench` that can't be, refused before anything is measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyattn.core.measure.table import load_table
from anyattn.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from anyattn.bench.cells import Cell
    from anyattn.bench.engine import Options

__all__ = ["check_admitted", "check_options", "check_skipped", "check_somebody", "strangers"]

_AT_LEAST = {"rounds": (2, "a spread takes two samples"), "threads": (1, "leave it out for torch's choice"),
             "build": (1, "leave it out to compile nothing ahead")}  # fmt: skip
_MEASURING = ("growth", "list", "build", "build_only", "resume", "only", "skip", "cells", "workloads",
              "modes", "quick", "minutes", "grid")  # fmt: skip
_UNHEEDED = ("list", "build", "build_only", "resume", "cells", "workloads", "modes", "quick", "minutes",
             "grid", "all", "no_peers")  # fmt: skip
"""What --growth, which has sizes of its own and no peers, would ignore."""


def check_options(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for numbers, combinations and paths that can't be."""
    for name, (least, hint) in _AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name}", asked=value, allowed=f">= {least}", hint=hint)
    if args.minutes is not None and not (math.isfinite(args.minutes) and args.minutes > 0):
        hint = "leave it out for as long as it takes"
        raise ConfigError("--minutes", asked=args.minutes, allowed="a number > 0", hint=hint)
    if args.merge and not args.write:
        raise ConfigError(
            "--merge", asked="no table", allowed="--write TABLE --merge", hint="add --write TABLE"
        )
    if args.resume and args.json in (None, "-"):
        raise ConfigError("--resume", asked="no file", allowed="--json FILE of the run to go on with")
    _check_saved(args)
    _check_without_result(args)
    _check_growth(args)
    _check_paths(args)


def _check_without_result(args: argparse.Namespace) -> None:
    """--growth, --list and --build-only make nothing that these could show."""
    given = [f"--{name}" for name in ("write", "plot", "markdown", "defaults") if getattr(args, name)]
    for name in ("growth", "list", "build_only"):
        if getattr(args, name) and given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} gives no result",
                asked=", ".join(given),
                allowed="--json",
                hint=f"leave {option} out",
            )


def _check_growth(args: argparse.Namespace) -> None:
    if args.growth:
        allowed = "--device, --threads, --rounds, --only, --skip, --json"
        _refuse_beside("--growth", "has no cells", args, _UNHEEDED, allowed)


def _check_saved(args: argparse.Namespace) -> None:
    if args.saved:
        allowed = "--json, --write, --merge, --plot, --markdown, --defaults: a saved result is shown whole"
        _refuse_beside("--from", "measures nothing", args, _MEASURING, allowed)


def _refuse_beside(
    option: str, why: str, args: argparse.Namespace, names: Sequence[str], allowed: str
) -> None:
    """Raises `ConfigError` if any of these options is given, which `option` would ignore."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    if given:
        hint = f"leave out {option if len(given) > 1 else f'{option} or {given[0]}'}"
        raise ConfigError(f"{option} {why}", asked=", ".join(given), allowed=allowed, hint=hint)


def _check_paths(args: argparse.Namespace) -> None:
    from anyattn.bench.outputs import check_file, check_folder_or_file, check_plot

    if args.json not in (None, "-"):
        check_file("--json", args.json)
    if args.markdown:
        check_file("--markdown", args.markdown)
    if args.plot:
        check_plot(args.plot)
    if args.write:
        check_folder_or_file("--write", args.write)
        if args.merge and Path(args.write).is_file():
            load_table(args.write)  # which must be sound before hours of measuring


def check_admitted(cells: Sequence[Cell], device: torch.device, options: Options) -> None:
    """Raises `ConfigError` if --only and --skip leave nobody in any cell, or --skip names nobody."""
    from anyattn.bench.engine import names_in

    if not options.only and not options.skip:
        return
    everybody = replace(options, only=(), skip=(), peers=True)
    here = {name for cell in cells for name in names_in(cell, device, everybody)}
    if here and not any(map(options.admits, here)):
        allowed = f"names or patterns of {'; '.join(sorted(here))}"
        raise _nobody(options.only, options.skip, allowed, "leave them out, or choose of those allowed")
    check_skipped(options.skip, here, options.say)


def check_skipped(skip: Sequence[str], here: set[str], say: Callable[[str], None]) -> None:
    """Says which names and patterns of --skip nobody has, of those here and of all backends.

    Raises:
        ConfigError: it is all of them.
    """
    from anyattn.api import registry

    known = {*here, *registry().names()}
    unknown = [glob for glob in skip if not any(fnmatchcase(name, glob) for name in known)]
    if unknown and len(unknown) == len(skip):
        allowed = f"names or patterns of {'; '.join(sorted(known))}"
        hint = "leave --skip out, or choose of those allowed"
        raise ConfigError("--skip names nobody", asked=",".join(skip), allowed=allowed, hint=hint)
    for glob in unknown:
        say(f"--skip {glob}: nobody has that name")


def strangers(args: argparse.Namespace, document: dict[str, Any]) -> list[str]:
    """Names and patterns of --only that nobody in any cell has: told, since the others' times count."""
    seen = {row["name"] for e in document["cells"] for row in (*e["results"], *e["skipped"])}
    return [glob for glob in args.only if not any(fnmatchcase(name, glob) for name in seen)]


def check_somebody(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Raises `ConfigError` if --only and --skip left nobody in any cell."""
    cells = document["cells"]
    if (args.only or args.skip) and cells and not any(e["results"] or e["skipped"] for e in cells):
        hint = "without them, everybody is listed by name"
        raise _nobody(args.only, args.skip, "names or patterns of who is here", hint)


def _nobody(only: Sequence[str], skip: Sequence[str], allowed: str, hint: str) -> ConfigError:
    asked = f"--only {','.join(only) or '(all)'} --skip {','.join(skip) or '(nobody)'}"
    return ConfigError("nobody takes part", asked=asked, allowed=allowed, hint=hint)
