"""Backends and platforms from entry points: found, checked as data, admitted or reported. Imports no torch.

Groups `anyattn.backends` and `anyattn.platforms`. An entry point names a record, several, or a function of no
arguments that returns them; what this package has built in comes through the same door. A plugin that can't
be used is never absent: a report says why and what mends it, and a record with a `fault` stands in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from anyattn import env
from anyattn.core.capabilities import BackendRecord, Fault
from anyattn.core.platform_record import PlatformRecord
from anyattn.detect.admission import Refused, backend_fault, check_name, platform_fault, records_of
from anyattn.detect.known import KNOWN
from anyattn.detect.library import Library, normalise
from anyattn.detect.simulated import HOSTS
from anyattn.errors import ConfigError, UnknownNameError, nearest

__all__ = ["BACKENDS", "BUILT_IN", "PLATFORMS", "PluginReport", "PluginState", "Plugins", "discover",
           "plugins"]  # fmt: skip

BACKENDS, PLATFORMS = "anyattn.backends", "anyattn.platforms"
"""Entry-point groups."""

BUILT_IN = (
    EntryPoint("anyattn", "anyattn.platforms:records", PLATFORMS),
    EntryPoint("anyattn", "anyattn.catalog:records", BACKENDS),
)
"""What this package brings itself; listed here because a checkout on PYTHONPATH has no metadata."""

_OWN = "anyattn"


class PluginState(Enum):
    """What became of an entry point."""

    LOADED = "loaded"
    BROKEN = "broken"
    DENIED = "denied"  # by ANYATTN_PLUGINS or ANYATTN_PLUGINS_DENIED: nothing of it was imported


@dataclass(frozen=True)
class PluginReport:
    """One entry point: where it comes from, what it gave, or why it gave nothing and what to do."""

    group: str
    name: str
    distribution: str
    version: str
    state: PluginState
    provides: tuple[str, ...] = ()
    fault: Fault | None = None

    @property
    def origin(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        what = "platform" if self.group == PLATFORMS else "backend"
        text = f"{what} plugin {self.name} of {self.origin} is {self.state.value}"
        return f"{text}: {self.fault}" if self.fault else text


@dataclass
class Plugins:
    """All records that were admitted, in the order of their registration, and a report on each plugin."""

    backends: dict[str, BackendRecord] = field(default_factory=dict)
    platforms: dict[str, PlatformRecord] = field(default_factory=dict)
    reports: list[PluginReport] = field(default_factory=list)

    @property
    def records(self) -> tuple[BackendRecord, ...]:
        """Backends; plain torch also serves every platform that a plugin brings."""
        extra = tuple(f"{name}:*" for name, entry in self.platforms.items() if entry.origin != _OWN)
        return tuple(_with_platforms(record, extra) for record in self.backends.values())

    @property
    def faults(self) -> tuple[PluginReport, ...]:
        """Reports on plugins that can't be used."""
        return tuple(r for r in self.reports if r.state is PluginState.BROKEN)

    @property
    def targets(self) -> tuple[str, ...]:
        """Every `platform:arch` that a row may name."""
        return (*HOSTS, *(target for entry in self.platforms.values() for target in entry.targets))

    def platform(self, name: str) -> PlatformRecord:
        """A platform by name. Raises `UnknownNameError`."""
        if name not in self.platforms:
            raise UnknownNameError("platform", name, self.platforms)
        return self.platforms[name]

    def brought(self) -> tuple[PlatformRecord, ...]:
        """Platforms that plugins brought."""
        return tuple(entry for entry in self.platforms.values() if entry.origin != _OWN)

    def known(self) -> dict[str, Library]:
        """Every library by its distribution: those that this package knows, and plugins' own."""
        return {**KNOWN, **{library.distribution: library for library in self.libraries()}}

    def libraries(self) -> tuple[Library, ...]:
        """Distributions that plugins' rows ask for and this package doesn't know."""
        found: dict[str, Library] = {}
        for record in self.backends.values():
            for row in record.rows if record.origin != _OWN else ():
                platforms = tuple(dict.fromkeys(a.partition(":")[0] for a in row.architectures))
                for provider in (*row.providers, *row.requires):
                    name = normalise(provider.distribution)
                    if name not in KNOWN:
                        found.setdefault(name, _library(name, provider.modules, platforms, record.name))
        return tuple(found.values())


def _with_platforms(record: BackendRecord, extra: tuple[str, ...]) -> BackendRecord:
    if not extra or not any(a.endswith(":*") for row in record.rows for a in row.architectures):
        return record
    rows = tuple(
        replace(row, architectures=(*row.architectures, *extra))
        if any(a.endswith(":*") for a in row.architectures)
        else row
        for row in record.rows
    )
    return replace(record, rows=rows)


def _library(name: str, modules: tuple[str, ...], platforms: tuple[str, ...], backend: str) -> Library:
    return Library(
        distribution=name,
        modules=modules or (name.replace("-", "_"),),
        platforms=platforms,
        recorded=None,
        provides=f"kernels of {backend}",
    )


@functools.cache
def plugins() -> Plugins:
    """What is installed, looked up once per process. Unknown names in the lists are errors.

    Raises:
        ConfigError: `ANYATTN_PLUGINS` or `ANYATTN_PLUGINS_DENIED` names no installed plugin.
    """
    installed = [*entry_points(group=PLATFORMS), *entry_points(group=BACKENDS)]
    return discover(installed)


def discover(installed: Iterable[EntryPoint], environ: Mapping[str, str] | None = None) -> Plugins:
    """Admit or report each of `installed`, after what is built in; platforms before backends.

    Raises:
        ConfigError: as `plugins`.
    """
    found = Plugins()
    own = [*installed]
    allowed, denied = _lists(own, environ) if own else (None, [])
    for group in (PLATFORMS, BACKENDS):
        ordered = sorted((p for p in own if p.group == group), key=lambda p: (_origin(p), p.name))
        for point in (*(b for b in BUILT_IN if b.group == group), *ordered):
            _take(point, found, allowed, denied)
    return found


def _origin(point: EntryPoint) -> tuple[str, str]:
    """Distribution and version; those of this package for what is built in."""
    if point.dist is None:
        return _OWN, ""
    return normalise(point.dist.name), point.dist.version


def _listed(name: str, environ: Mapping[str, str] | None) -> list[str] | None:
    text = env.read(name, environ)
    return None if text is None else [normalise(part) for part in text.split(",") if part.strip()]


def _lists(
    installed: Sequence[EntryPoint], environ: Mapping[str, str] | None
) -> tuple[list[str] | None, list[str]]:
    """Allowed distributions (None = all) and denied ones.

    A denied one needn't be installed, for fleets share their settings; but one that is spelt almost like an
    installed plugin is an error: it would let in what was to be kept out.
    """
    known = sorted({_origin(point)[0] for point in installed})
    allowed, denied = _listed("ANYATTN_PLUGINS", environ), _listed("ANYATTN_PLUGINS_DENIED", environ) or []
    if allowed == ["none"]:
        allowed = []
    for name in allowed or []:
        if name not in known:
            raise _unknown("ANYATTN_PLUGINS", name, known)
    for name in denied:
        if name not in known and nearest(name, known):
            raise _unknown("ANYATTN_PLUGINS_DENIED", name, known)
    return allowed, denied


def _unknown(variable: str, name: str, known: Sequence[str]) -> ConfigError:
    guess = nearest(name, known)
    return ConfigError(
        f"{variable} names a distribution without plugins here",
        asked=repr(name),
        allowed=", ".join(known) or "none is installed",
        hint=f"did you mean {guess!r}?" if guess else f"install it, or take it out of {variable}",
    )


def _take(point: EntryPoint, found: Plugins, allowed: list[str] | None, denied: Sequence[str]) -> None:
    distribution, version = _origin(point)
    report = PluginReport(point.group, point.name, distribution, version, PluginState.LOADED)
    if point.dist is not None:
        blocked = _blocked(distribution, allowed, denied)
        if blocked is not None:
            found.reports.append(replace(report, state=PluginState.DENIED, fault=blocked))
            return
    try:
        given = _admit(point, found, report)
    except Refused as refused:
        if point.dist is None:  # a record of our own that is wrong is a bug here, not somebody's plugin
            raise
        found.reports.append(replace(report, state=PluginState.BROKEN, fault=refused.fault))
        _stand_in(point, found, report, refused.fault)
        return
    if point.dist is not None:
        found.reports.append(replace(report, provides=given))


def _blocked(distribution: str, allowed: list[str] | None, denied: Sequence[str]) -> Fault | None:
    if distribution in denied:
        remedy = f"take {distribution} out of ANYATTN_PLUGINS_DENIED"
        return Fault("named in ANYATTN_PLUGINS_DENIED", "distributions that it doesn't name", remedy)
    if allowed is not None and distribution not in allowed:
        names = ", ".join(allowed) or "none"
        return Fault("not named in ANYATTN_PLUGINS", names, f"add {distribution} to ANYATTN_PLUGINS")
    return None


def _admit(point: EntryPoint, found: Plugins, report: PluginReport) -> tuple[str, ...]:
    """Load, check all, then register all: a plugin is taken whole or not at all. Raises `Refused`."""
    own, given = point.dist is None, records_of(point, report.distribution)
    names: list[str] = []
    taken: dict[str, Any] = found.platforms if point.group == PLATFORMS else found.backends
    if not own and len(given) == 1:
        check_name(given[0], point)
    for record in given:
        if point.group == PLATFORMS:
            platform_fault(record, point, own=own)
        else:
            backend_fault(record, point, found.targets, tuple(found.platforms), own=own)
        aliases = () if point.group == PLATFORMS else record.deprecated_aliases
        others = {n for r in found.backends.values() for n in r.deprecated_aliases} | set(taken) | {*names}
        for name in (record.name, *aliases):
            if name in others:
                owner = taken[name].origin if name in taken else "another backend"
                remedy = f"rename it in {report.distribution}, or deny that in ANYATTN_PLUGINS_DENIED"
                raise Refused(Fault(f"the name {name!r}, which is {owner}'s", "a name of its own", remedy))
        names.append(record.name)
    for record in given:
        taken[record.name] = record if own else replace(record, origin=report.origin)
    return tuple(names)


def _stand_in(point: EntryPoint, found: Plugins, report: PluginReport, fault: Fault) -> None:
    """A broken backend keeps its place in every list, by its entry point's name, unless that is taken."""
    if point.group == BACKENDS and point.name not in found.backends:
        summary = f"a plugin of {report.origin} that can't be used"
        found.backends[point.name] = BackendRecord(point.name, summary, (), origin=report.origin, fault=fault)
