"""Explicit choices: arguments, then environment, then pinned decisions. Each is honoured or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyattn.core.capabilities import Phase
from anyattn.core.facts import HostFacts
from anyattn.core.registry import Registry
from anyattn.core.select.request import Request
from anyattn.env import read
from anyattn.errors import ConfigError

__all__ = ["Choice", "Wishes", "gather", "load_pins"]

Pin = Mapping[str, Any]

_COMPARED = ("specs", "dtype", "kv_dtype", "deterministic", "features", "kind")
"""Fields of a pinned request that must equal the current one: what the model is, not how it's served."""


@dataclass(frozen=True)
class Choice:
    """A backend somebody named for a phase.

    `how` is explicit, environment or pinned; `source` says where, for messages; `strict` is False for a
    choice made for all phases at once, which a role that isn't in use may leave empty.
    """

    backend: str
    how: str
    source: str
    strict: bool


@dataclass(frozen=True)
class Wishes:
    """All explicit choices for one selection. `page_source` and `layout_source` say who asked."""

    phases: Mapping[Phase, Choice]
    page_size: int | None = None
    page_source: str = ""
    layout: str | None = None
    layout_source: str = ""


def load_pins(path: str | Path) -> tuple[Pin, ...]:
    """Pinned decisions: one object as `anyattn select --json` prints it, or a list of them.

    Of each, `host` (platform and arch) must be there; `request`, the phases (objects with `backend`, or
    plain names), `kv.page_size` and `kv.layout` are used where present.

    Raises:
        ConfigError: the file can't be read, isn't JSON, or an entry lacks its host.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "write it with `anyattn select ... --json`, or unset ANYATTN_PINS"
        raise ConfigError("pinned decisions can't be read", asked=f"{path}: {error}", hint=hint) from error
    pins = tuple(data) if isinstance(data, list) else (data,)
    for pin in pins:
        host = pin.get("host") if isinstance(pin, dict) else None
        if not isinstance(host, dict) or not {"platform", "arch"} <= set(host):
            allowed = "objects with host.platform and host.arch"
            raise ConfigError("a pinned decision", asked=str(path), allowed=allowed)
    return pins


def _matching(pins: Sequence[Pin], request: Request, facts: HostFacts) -> Pin | None:
    """The first pin for this architecture whose request, if it has one, asks for the same model."""
    current = request.to_json()
    for pin in pins:
        if (pin["host"]["platform"], pin["host"]["arch"]) != (facts.platform, facts.arch):
            continue
        pinned = pin.get("request") or {}
        if all(pinned[k] == current[k] for k in _COMPARED if k in pinned):
            return pin
    return None


def _pinned_name(pin: Pin, phase: Phase) -> str | None:
    value = pin.get(phase.value)
    name = value.get("backend") if isinstance(value, Mapping) else value
    return None if name is None else str(name)


def _page_from(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(
            f"value of {name}",
            asked=repr(text),
            allowed="a number of tokens >= 1",
            hint=f"unset {name} to let selection choose",
        )
    return int(text)


def _phase_choice(
    phase: Phase, request: Request, environ: Mapping[str, str] | None, pin: Pin | None
) -> Choice | None:
    own, every = request.choice(phase), request.backend
    if own is not None:
        return Choice(own, "explicit", f"{phase.value}={own!r}", True)
    if every is not None:
        return Choice(every, "explicit", f"backend={every!r}", False)
    for name, strict in ((f"ANYATTN_{phase.name}_BACKEND", True), ("ANYATTN_BACKEND", False)):
        value = read(name, environ)
        if value is not None:
            return Choice(value, "environment", f"{name}={value}", strict)
    pinned = _pinned_name(pin, phase) if pin is not None else None
    if pinned is not None:
        return Choice(pinned, "pinned", f"pinned {phase.value}={pinned!r}", True)
    return None


def _pool_wish(
    request: Request, environ: Mapping[str, str] | None, pin: Pin | None
) -> tuple[int | None, str, str | None, str]:
    kv = (pin or {}).get("kv") or {}
    page, page_source = request.page_size, f"page_size={request.page_size}"
    variable = read("ANYATTN_PAGE_SIZE", environ)
    if page is None and variable is not None:
        page, page_source = _page_from(variable, "ANYATTN_PAGE_SIZE"), f"ANYATTN_PAGE_SIZE={variable}"
    elif page is None and kv.get("page_size") is not None:
        text = str(kv["page_size"])
        page, page_source = _page_from(text, "pinned page_size"), f"pinned page_size={text}"
    layout, layout_source = request.layout, f"layout={request.layout!r}"
    if layout is None and kv.get("layout") is not None:
        layout, layout_source = str(kv["layout"]), f"pinned layout={kv['layout']!r}"
    return page, page_source if page else "", layout, layout_source if layout else ""


def gather(
    request: Request,
    facts: HostFacts,
    registry: Registry,
    *,
    environ: Mapping[str, str] | None = None,
    pins: Sequence[Pin] | None = None,
) -> Wishes:
    """Explicit choices by phase, with canonical backend names, and the pool asked for.

    A pinned pool belongs to the pinned pair: it doesn't bind a backend that was named over the pin.

    Raises:
        UnknownNameError: a backend that nobody registered, wherever it was named.
        ConfigError: an impossible page size, unreadable pins.
    """
    path = read("ANYATTN_PINS", environ)
    if pins is None:
        pins = load_pins(path) if path is not None else ()
    pin = _matching(pins, request, facts)
    phases = {}
    for phase in Phase:
        choice = _phase_choice(phase, request, environ, pin)
        if choice is not None:
            name = registry.get(choice.backend).name
            renamed = "" if name == choice.backend else f" (now called {name!r})"
            phases[phase] = Choice(name, choice.how, choice.source + renamed, choice.strict)
    overridden = any(p in phases and phases[p].how != "pinned" for p in (Phase.PREFILL, Phase.DECODE))
    page, page_source, layout, layout_source = _pool_wish(request, environ, None if overridden else pin)
    return Wishes(phases, page, page_source, layout, layout_source)
