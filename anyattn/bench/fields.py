"""Fields of a saved result, checked once where it is read, so that nothing later stumbles over them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from anyattn.bench.cells import Cell, Step
from anyattn.errors import ConfigError

__all__ = ["check_fields"]

_TEXTS = ("device", "arch", "date", "commit", "command")
_LIMITS = ("copy_gb_s", "read_gb_s", "gemm_tflop_s")
_RATES = ("spread", "gb_s", "tflop_s")
_MODES = ("graph", "eager")
_KINDS = ("backend", "peer")
_STEPS = get_args(Step)


def check_fields(document: Mapping[str, Any], name: str) -> None:
    """Raises `ConfigError` for the first field that isn't as a run writes it; names file and cell."""
    where = "the head"
    try:
        _head(document)
        for number, entry in enumerate(document["cells"], 1):
            where = f"cell {number}"
            _entry(entry)
    except KeyError as error:
        raise _refused(name, where, f"no {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refused(name, where, str(error)) from error


def _refused(name: str, where: str, why: str) -> ConfigError:
    hint = "measure again, or take a copy that nobody edited"
    return ConfigError(
        f"fields of a bench result, in {where}",
        asked=f"{name}: {why}",
        allowed="as a run writes them",
        hint=hint,
    )


def _need(what: str, fits: bool, value: object) -> None:
    if not fits:
        raise ValueError(f"{what} = {value!r}")


def _head(document: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        _need(name, isinstance(document[name], str), document[name])
    for name, kind in (("versions", Mapping), ("limits", Mapping), ("cells", list), ("left_out", list)):
        _need(name, isinstance(document[name], kind), document[name])
    _need("units", document.get("units") is None or isinstance(document["units"], int), document.get("units"))
    for name in _LIMITS if document["limits"] else ():
        _number(name, document["limits"][name], above_zero=True)
    if document["limits"]:
        _need("dtype", isinstance(document["limits"]["dtype"], str), document["limits"]["dtype"])


def _number(name: str, value: Any, *, above_zero: bool = False) -> None:
    number = isinstance(value, int | float) and math.isfinite(value)
    _need(name, number and (value > 0 if above_zero else value >= 0), value)


def _entry(entry: Mapping[str, Any]) -> None:
    _need("mode", entry["mode"] in _MODES, entry["mode"])
    for name in ("name", "workload"):
        _need(name, isinstance(entry["cell"][name], str), entry["cell"][name])
    _need("choice", isinstance(entry.get("choice"), str | None), entry.get("choice"))
    cell = Cell.from_json(dict(entry["cell"]))
    for length in (*cell.prefixes, *cell.news):
        _number("length", length)
    _need("batch", cell.batch > 0 and cell.work().bytes > 0, cell.batch)
    _need("step", cell.step in _STEPS, cell.step)
    _number("copies", entry["copies"])
    _all(entry["skipped"], ("name", "why"))
    _all(entry["results"], ("name", "kind"))
    for result in entry["results"]:
        _need("kind", result["kind"] in _KINDS, result["kind"])
        for name in ("median_s", "best_s", "rounds", "page"):
            if name in result or name == "median_s":
                _number(name, result[name], above_zero=True)
        if "of_limit" in result:
            _number("of_limit", result["of_limit"])
        for name in _RATES:
            _number(name, result[name])


def _all(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for row in rows:
        for name in names:
            _need(name, isinstance(row[name], str), row[name])
