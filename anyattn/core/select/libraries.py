"""Does the host have the kernel library that a row needs: presence, version, owner of the module, state."""

from __future__ import annotations

import functools
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from anyattn.core.capabilities import CapabilityRow, Provider
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.select.decision import Reason, ReasonCode

__all__ = [
    "importable",
    "library_reasons",
    "provider_reason",
    "providers_in_use",
    "serving_provider",
    "version_in",
]

Importable = Literal["unknown", "yes", "no"]

_NEARNESS = (
    ReasonCode.LIBRARY_BLOCKED,
    ReasonCode.LIBRARY_SHADOWED,
    ReasonCode.LIBRARY_VERSION,
    ReasonCode.LIBRARY_BROKEN,
    ReasonCode.LIBRARY_MISSING,
)


@functools.cache
def version_in(version: str, versions: str) -> bool:
    """True if a PEP 440 version lies in a range (`""` = any). Pre-releases count; odd versions don't."""
    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return versions == ""


def _wanted(provider: Provider) -> str:
    return f"{provider.distribution}{provider.versions}"


def _owner(module: str, facts: HostFacts) -> str | None:
    """The distribution that owns a module, or its top-level name, where the host knows it."""
    for wanted in (module, module.partition(".")[0]):
        for name, library in facts.libraries.items():
            if library.state is not LibraryState.MISSING and wanted in library.modules:
                return name
    return None


def _shadow(provider: Provider, library: LibraryFacts, facts: HostFacts) -> Reason | None:
    """Why a module that the provider needs isn't its own. A host that lists no owners at all is believed."""
    for module in provider.modules:
        if {module, module.partition(".")[0]} & set(library.modules):
            continue
        owner = _owner(module, facts)
        if owner is None and not library.modules and library.reason is None:
            continue
        asked = f"module {module} of {owner or 'somebody else'}"
        remedy = f"uninstall {owner}, then reinstall {library.distribution}" if owner else "reinstall it"
        allowed = f"module of {library.distribution}"
        return Reason(ReasonCode.LIBRARY_SHADOWED, asked, allowed, library.reason or remedy)
    return None


def provider_reason(provider: Provider, facts: HostFacts) -> Reason | None:
    """Why this distribution can't serve on this host, or None."""
    library = facts.library(provider.distribution)
    install = f"install {provider.distribution}; `anyattn doctor` says how"
    asked = f"{provider.distribution} {library.version or '(version unknown)'}"
    if library.state is LibraryState.MISSING:
        return Reason(ReasonCode.LIBRARY_MISSING, "not installed", _wanted(provider), install)
    # A simulated host may leave the version open, which then stands for one that suits.
    suits = facts.simulated if library.version is None else version_in(library.version, provider.versions)
    if provider.versions and not suits:
        return Reason(ReasonCode.LIBRARY_VERSION, asked, _wanted(provider), install)
    if library.state is LibraryState.BROKEN:
        why = library.reason or "it can't be imported"
        return Reason(ReasonCode.LIBRARY_BROKEN, asked, "a build that imports", f"{why}; reinstall it")
    shadow = _shadow(provider, library, facts)
    if shadow is None and library.block is not None:
        hint = f"{library.block.detail}: {library.block.remedy}"
        return Reason(ReasonCode.LIBRARY_BLOCKED, asked, "a library that can compile its kernels", hint)
    return shadow


def _any_of(providers: tuple[Provider, ...], facts: HostFacts) -> Reason | None:
    """Reason of the provider that is nearest to serving, None if one serves or none is needed."""
    reasons = [provider_reason(p, facts) for p in providers]
    failed = [r for r in reasons if r is not None]
    if len(failed) < len(reasons) or not failed:
        return None
    nearest = min(failed, key=lambda r: _NEARNESS.index(r.code))
    if nearest.code is ReasonCode.LIBRARY_MISSING and len(providers) > 1:
        allowed = " or ".join(_wanted(p) for p in providers)
        return Reason(nearest.code, nearest.asked, allowed, nearest.hint)
    return nearest


def library_reasons(row: CapabilityRow, facts: HostFacts) -> list[Reason]:
    """Why the host's libraries and runtime don't carry the row; empty if they do."""
    found = [_any_of(row.providers, facts), *(provider_reason(p, facts) for p in row.requires)]
    reasons = [r for r in found if r is not None]
    known = facts.runtime is not None
    if row.runtime and not (version_in(facts.runtime or "", row.runtime) if known else facts.simulated):
        hint = "update the driver or the toolkit" if known else "`anyattn doctor` shows what was found"
        asked = f"{facts.platform} runtime {facts.runtime or 'unknown'}"
        reasons.append(Reason(ReasonCode.RUNTIME_VERSION, asked, row.runtime, hint))
    return reasons


def serving_provider(row: CapabilityRow, facts: HostFacts) -> LibraryFacts | None:
    """The first of the row's providers that serves on this host; None where it needs none, or none does."""
    serving = (p for p in row.providers if provider_reason(p, facts) is None)
    return next((facts.library(p.distribution) for p in serving), None)


def providers_in_use(row: CapabilityRow, facts: HostFacts) -> tuple[LibraryFacts, ...]:
    """The libraries that the row would run on: the provider that serves, and all that it requires."""
    serving = serving_provider(row, facts)
    required = (facts.library(p.distribution) for p in row.requires)
    return (*(() if serving is None else (serving,)), *required)


def importable(row: CapabilityRow, facts: HostFacts) -> Importable:
    """`yes` after a probe or without need of a library, `no` where one is missing or broken."""
    if library_reasons(row, facts):
        return "no"
    states = {library.state for library in providers_in_use(row, facts)}
    return "yes" if states <= {LibraryState.USABLE} else "unknown"
