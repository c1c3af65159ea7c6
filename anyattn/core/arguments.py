"""Checks of what callers pass in: whole numbers, numbers, instances. Each names asked, allowed and next."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypeVar

from anyattn.errors import AnyattnError, ConfigError

__all__ = ["check_instance", "check_number", "check_whole"]

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
