"""Checks of what callers pass in: whole numbers, numbers, instances; and of what stands on a command line.

Each names asked, allowed and next.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import sys
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from anyattn.errors import AnyattnError, ConfigError

__all__ = [
    "argument",
    "at_least",
    "check_instance",
    "check_number",
    "check_whole",
    "count",
    "counts",
    "one_line_errors",
]

P = ParamSpec("P")
T = TypeVar("T")


def check_whole(
    name: str, value: Any, at_least: int, *, hint: str = "", error: type[AnyattnError] = ConfigError
) -> None:
    """Raise `error` unless `value` is an int (no bool, no float) of at least `at_least`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if whole and value >= at_least:
        return
    kind = "" if whole else "an int "
    wanted = f">= {at_least}" if whole else "as an int"
    raise error(name, asked=repr(value), allowed=f"{kind}>= {at_least}", hint=hint or f"give {name} {wanted}")


def check_number(name: str, value: Any, *, positive: bool = False, hint: str = "") -> None:
    """Raise `ConfigError` unless `value` is a finite int or float, above 0 if `positive`."""
    fine = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if fine and (value > 0 or not positive):
        return
    allowed = "a finite number > 0" if positive else "a finite number"
    raise ConfigError(name, asked=repr(value), allowed=allowed, hint=hint or f"give {name} as a float")


def check_instance(
    name: str, value: Any, kind: type[T], hint: str, *, error: type[AnyattnError] = ConfigError
) -> T:
    """`value`, or `error` if it isn't a `kind`; `hint` says where to get one."""
    if isinstance(value, kind):
        return value
    shown = repr(value)
    asked = shown if len(shown) <= 60 else type(value).__name__
    raise error(name, asked=asked, allowed=kind.__name__, hint=hint)


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` as a type of argparse: what its `AnyattnError` says is the parser's message, whole."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except AnyattnError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def at_least(least: int) -> Callable[[str], int]:
    """Type of an option that takes a whole number of at least `least`."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ConfigError("a number", asked=repr(text), allowed=f"a whole number >= {least}")
        return value

    return argument(whole)


count = at_least(1)
"""Type of an option that counts something."""


def counts(text: str) -> list[int]:
    """Type of an option that takes counts, as in `1,64,256`."""
    return [count(part) for part in text.split(",")]


def one_line_errors(main: Callable[P, int]) -> Callable[P, int]:
    """`main` of a module that is a command: an `AnyattnError` is a line on stderr, and exit code 2."""
    name = Path(inspect.getfile(main)).stem

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except AnyattnError as error:
            print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2

    return run
