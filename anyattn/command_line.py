"""Types of argparse's options, and how a module that is a command ends: for this package's commands and the
benchmarks. What is refused names asked, allowed and next.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from anyattn.errors import AnyattnError, ConfigError

__all__ = ["argument", "at_least", "count", "counts", "one_line_errors"]

P = ParamSpec("P")
T = TypeVar("T")


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
