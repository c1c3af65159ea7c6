"""The grid: cells from a file of data, and which of them a run takes."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from anyattn.bench.cells import Cell, Step
from anyattn.bench.chat import Chat, contexts, day, representatives
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["choose", "load_grid"]

_KEYS = {"batch", "context", "prefix", "new", "mixed", "ragged", "heads", "dim", "page", "window", "dtype",
         "kv_dtype", "latent", "modes", "worth", "quick", "day"}  # fmt: skip
_MODES = ("graph", "eager")
_LATENT = (576, 512)


def load_grid(kind: str, path: str | Path | None = None) -> list[Cell]:
    """Cells of `kind` ("gpu" or "cpu") of a file, default: the one that ships; the worthiest first.

    Raises:
        ConfigError: a file that isn't there or can't be read as a grid. UnknownNameError: a key or kind.
    """
    try:
        text = _shipped() if path is None else Path(path).read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("--grid can't be read", asked=f"{path}: {error}", allowed="a TOML file",
                          hint="change a copy of anyattn/data/bench/grid.toml") from error  # fmt: skip
    if kind not in data:
        raise UnknownNameError("kind of grid", kind, data)
    cells = [cell for workload, table in data[kind].items() for cell in _workload(workload, table)]
    return sorted(cells, key=lambda cell: cell.worth)


def _shipped() -> str:
    return files("anyattn").joinpath("data/bench/grid.toml").read_text(encoding="utf-8")


def choose(
    cells: Sequence[Cell],
    *,
    workloads: Iterable[str] = (),
    patterns: Iterable[str] = (),
    quick: bool = False,
    modes: Iterable[str] = (),
) -> list[Cell]:
    """Those of the workloads, whose names match a pattern (`decode-64x8k*`), of the quick part, in modes.

    Raises:
        UnknownNameError: a workload, pattern or mode that names nothing.
    """
    modes = tuple(modes)
    for mode in modes:
        if mode not in _MODES:
            raise UnknownNameError("mode", mode, _MODES)
    known = dict.fromkeys(cell.workload for cell in cells)
    for name in workloads:
        if name not in known:
            raise UnknownNameError("workload", name, known)
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise UnknownNameError("cell", pattern, [cell.name for cell in cells])
    wanted, globs, only = set(workloads), tuple(patterns), set(modes)
    return [
        cell
        for cell in cells
        if (not wanted or cell.workload in wanted)
        and (not globs or any(fnmatchcase(cell.name, glob) for glob in globs))
        and (cell.quick or not quick)
        and (not only or only.intersection(cell.modes))
    ]


def _workload(workload: str, table: Mapping[str, Any]) -> list[Cell]:
    defaults = {name: value for name, value in table.items() if name != "cells"}
    _check(workload, defaults)
    if "day" in defaults:
        return _chat(workload, defaults)
    return [_cell(workload, defaults | given) for given in table.get("cells", ())]


def _check(workload: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _KEYS:
            raise UnknownNameError(f"key of {workload}", name, _KEYS)
    for mode in given.get("modes", ()):
        if mode not in _MODES:
            raise UnknownNameError(f"mode of {workload}", mode, _MODES)


def _shape(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell has besides lengths."""
    query, _, own = str(given.get("heads", "32/8")).partition("/")
    dim, v_dim = _LATENT if given.get("latent") else (given.get("dim", 128),) * 2
    dtype = given.get("dtype", "bfloat16")
    return {
        "num_q": int(query), "num_kv": int(own), "dim": dim, "v_dim": v_dim, "page": given.get("page", 16),
        "dtype": dtype, "kv_dtype": given.get("kv_dtype", dtype), "window": given.get("window"),
        "modes": tuple(given.get("modes", ("eager",))), "worth": given.get("worth", 2),
        "quick": given.get("quick", False),
    }  # fmt: skip


def _cell(workload: str, given: Mapping[str, Any]) -> Cell:
    _check(workload, given)
    try:
        step, prefixes, news = _lengths(workload, given)
        return Cell(workload, step, tuple(prefixes), tuple(news), **_shape(given))
    except (KeyError, ValueError) as error:
        hint = "the head of data/bench/grid.toml lists the keys"
        raise ConfigError(
            f"a cell of {workload}", asked=dict(given), allowed=str(error), hint=hint
        ) from error


def _lengths(workload: str, given: Mapping[str, Any]) -> tuple[Step, list[int], list[int]]:
    batch = given["batch"]
    ragged = _ragged(given["ragged"], batch) if "ragged" in given else None
    if "mixed" in given:
        chunks: list[int] = given["mixed"]
        prefixes = ragged or [given["prefix"]] * batch
        return "mixed", prefixes, [*chunks, *[1] * (batch - len(chunks))]
    if "new" in given:
        step: Step = "verify" if workload == "verify" else "extend"
        return step, ragged or [given["prefix"]] * batch, [given["new"]] * batch
    if "prefix" in given:
        if ragged is None:
            raise KeyError("new tokens: new = N, or ragged")
        return "extend", [given["prefix"]] * batch, ragged
    full = ragged or [given["context"]] * batch
    return "decode", [n - 1 for n in full], [1] * batch


def _ragged(text: str, batch: int) -> list[int]:
    """Lengths by a word: the same in every run."""
    kind, *words = text.split()
    numbers = [int(word) for word in words if word.isdigit()]
    if kind == "chat" and not words:
        return contexts(batch, seed=batch)
    if kind == "uniform" and len(numbers) == 2:
        rng = random.Random(batch)
        return [rng.randint(*numbers) for _ in range(batch)]
    if kind == "one" and len(numbers) == 2:
        return [numbers[0], *[numbers[1]] * (batch - 1)]
    raise ValueError(f'ragged = "uniform LOW HIGH", "one LONG rest SHORT" or "chat", not {text!r}')


def _chat(workload: str, given: Mapping[str, Any]) -> list[Cell]:
    options = dict(given["day"])
    counts = {kind: options.pop(f"{kind}_steps", 6) for kind in ("decode", "extend")}
    known = [field.name for field in fields(Chat)]
    for name in options:
        if name not in known:
            raise UnknownNameError(f"key of {workload}.day", name, [*known, "decode_steps", "extend_steps"])
    steps = day(Chat(**options))
    shape = _shape(given)
    found = []
    for kind, count in counts.items():
        for step in representatives(steps, kind, count):
            modes = shape["modes"] if kind == "decode" else ("eager",)
            found.append(Cell(
                workload, cast(Step, kind), tuple(p for p, _ in step.pairs), tuple(n for _, n in step.pairs),
                weight=step.count, **shape | {"modes": modes},
            ))  # fmt: skip
    return found
