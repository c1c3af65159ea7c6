"""The one table of `ANYATTN_*` variables: names, meanings, values. Unknown ones are errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from anyattn.errors import ConfigError, UnknownNameError, nearest

__all__ = ["PREFIX", "VARIABLES", "Variable", "check_environment", "read"]

PREFIX = "ANYATTN_"


@dataclass(frozen=True)
class Variable:
    """One variable: its meaning, its default and, where it is an enumeration, its values."""

    name: str
    meaning: str
    default: str | None = None
    values: tuple[str, ...] | None = None


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("ANYATTN_BACKEND", "backend for every phase that has no choice of its own"),
        Variable("ANYATTN_PREFILL_BACKEND", "backend for prefill and extend"),
        Variable("ANYATTN_DECODE_BACKEND", "backend for decode"),
        Variable("ANYATTN_VERIFY_BACKEND", "backend for target verification"),
        Variable("ANYATTN_DRAFT_BACKEND", "backend of the draft model"),
        Variable("ANYATTN_PAGE_SIZE", "tokens a KV page holds"),
        Variable("ANYATTN_PINS", "path of a JSON file with pinned decisions"),
        Variable(
            "ANYATTN_MEASUREMENTS", "measured tables to rank by, instead of those that ship; `none` for none"
        ),
        Variable("ANYATTN_CHECKS", "what is verified at run time", "host", ("off", "host", "full")),
        Variable("ANYATTN_CACHE_DIR", "folder for probe results and compiled tables"),
        Variable("ANYATTN_PLUGINS", "distributions whose plugins load, comma-separated; `none` for none"),
        Variable("ANYATTN_PLUGINS_DENIED", "distributions whose plugins don't load"),
        Variable("ANYATTN_ASSUME", "simulated host, as in `anyattn select --assume`"),
    )
}


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Raise `UnknownNameError` / `ConfigError` for a misspelt variable or an impossible value (not empty)."""
    environ = os.environ if environ is None else environ
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in VARIABLES:
            raise UnknownNameError("environment variable", name, VARIABLES)
        values = VARIABLES[name].values
        if values is not None and value and value not in values:
            raise _impossible(name, value, values)


def _impossible(name: str, value: str, allowed: tuple[str, ...]) -> ConfigError:
    guess = nearest(value, allowed)
    hint = f"did you mean {guess!r}?" if guess else f"unset {name} for the default"
    return ConfigError(f"value of {name}", asked=repr(value), allowed=", ".join(allowed), hint=hint)


def read(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Value of a known variable, its default when unset or empty."""
    variable = VARIABLES[name]
    value = (os.environ if environ is None else environ).get(name) or None
    if value is not None and variable.values is not None and value not in variable.values:
        raise _impossible(name, value, variable.values)
    return variable.default if value is None else value
