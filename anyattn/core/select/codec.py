"""Frozen dataclasses to plain JSON values and back, driven by their annotations."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from anyattn.errors import ConfigError

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """JSON value of a dataclass tree. Enums become their values, sets sorted lists, tuples lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {to_plain(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(to_plain(v) for v in value)
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """A `kind` rebuilt from `to_plain`'s output.

    Raises:
        ConfigError: the data doesn't fit the annotations (unknown fields included).
    """
    try:
        return cast(T, _build(kind, data))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"JSON of {kind.__name__}", asked=str(error)) from error


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _build(kind: Any, data: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union or origin is types.UnionType:
        return None if data is None else _build(next(a for a in args if a is not type(None)), data)
    if origin is Literal or kind is Any:
        return data
    if origin is tuple:
        return _build_tuple(args, data)
    if origin in (frozenset, Sequence):
        return (frozenset if origin is frozenset else tuple)(_build(args[0], item) for item in data)
    if origin in (dict, Mapping):
        return {_build(args[0], k): _build(args[1], v) for k, v in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if is_dataclass(kind):
        return _build_dataclass(cast(type, kind), data)
    if kind is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, kind):
        raise TypeError(f"expected {kind.__name__}, found {data!r}")
    return data


def _build_tuple(args: tuple[Any, ...], data: Any) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], item) for item in data)
    return tuple(_build(arg, item) for arg, item in zip(args, data, strict=True))


def _build_dataclass(kind: type, data: Any) -> Any:
    hints = _hints(kind)
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    return kind(**{name: _build(hints[name], value) for name, value in data.items()})
