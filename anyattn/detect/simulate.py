"""Facts of a machine that isn't there: `platform:arch`, then `+library==version` or `-library`.

    rocm:gfx942+amd-aiter==0.1.7-triton      an MI300X with that AITER and without Triton
    cuda:sm90-flashinfer-python+triton==3.6.0

Names of distributions contain `-` themselves, so the text is read with the list of known names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.detect.libraries import against_torch
from anyattn.detect.library import Library
from anyattn.detect.plugins import Plugins, plugins
from anyattn.detect.simulated import HOSTS, RUNTIMES, TORCH
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["simulate"]

# A local part (`+cpu`, `+cu130`) has a digit or is a known word; else `+` starts the next library.
_VERSION = re.compile(r"v?\d[a-z0-9.!]*(?:\+(?:cpu|xpu|[a-z.]*\d[a-z0-9.]*))?")
_FORM = "+library, +library==version or -library after the host"
_HOST = re.compile(r"([a-z][a-z0-9]*):(\w+)")


def simulate(text: str, found: Plugins | None = None) -> HostFacts:
    """Facts of a simulated host, with all of its platform's libraries unless the text says otherwise.

    Of two libraries that ship the same module, the one named last owns it, as if installed later. Plugins
    (`found`, default: what is installed) may bring platforms and libraries of their own.

    Raises:
        UnknownNameError: an architecture or library that isn't known; the nearest is suggested.
        ConfigError: a text or version that can't be read.
    """
    lowered = text.strip().lower().replace("_", "-")
    match = _HOST.match(lowered)
    end = match.end() if match else next((i for i, c in enumerate(lowered) if c in "+-"), len(lowered))
    target = lowered[:end]
    found = found or plugins()
    if target not in found.targets:
        raise UnknownNameError("simulated host", target, found.targets)
    platform, _, arch = target.partition(":")
    host = HOSTS.get(target) or found.platform(platform).hosts[arch]
    known = found.known()
    versions = {
        library.distribution: library.recorded
        for library in known.values()
        if platform in library.platforms
        and library.simulated
        and (not library.machines or host.machine in library.machines)
    }
    torch = TORCH.get(platform, TORCH["cpu"])
    versions["torch"] = torch[0]
    for library, version in _changes(lowered[end:], known):
        versions.pop(library.distribution, None)  # what is named last is installed last
        if version is not _REMOVE:
            versions[library.distribution] = version or library.recorded
    return HostFacts(
        platform=platform,
        arch=arch,
        device_name=host.device_name,
        device_count=1,
        memory_bytes=host.memory_bytes,
        num_units=host.num_units,
        features=host.features,
        runtime=RUNTIMES[platform] if platform in RUNTIMES else found.platform(platform).runtime,
        python="3.11",
        torch=versions.get("torch"),
        torch_build=torch[1] if "torch" in versions else None,
        libraries=_libraries(versions, known),
        simulated=True,
    )


_REMOVE = "-"


def _changes(text: str, known: Mapping[str, Library]) -> Iterator[tuple[Library, str | None]]:
    """(library, version) for each `+`; the version is None for the recorded one, `-` for a removal."""
    names = {name: library for library in known.values() for name in (library.distribution, *library.aliases)}
    pattern = re.compile("|".join(sorted(map(re.escape, names), key=len, reverse=True)))
    rest = text
    while rest:
        sign, rest = rest[0], rest[1:]
        match = pattern.match(rest)
        if sign not in "+-" or not rest or rest.startswith("="):
            raise ConfigError("a simulated host that can't be read", asked=repr(text), allowed=_FORM)
        if match is None or not _ends(rest[match.end() :]):
            raise UnknownNameError("library", re.split(r"==|\+", rest)[0], names)
        library, rest = names[match.group()], rest[match.end() :]
        version: str | None = _REMOVE if sign == "-" else None
        if rest.startswith("=="):
            version, rest = _version(library, sign, rest[2:])
        yield library, version


def _ends(rest: str) -> bool:
    return not rest or rest[0] in "+-="


def _version(library: Library, sign: str, rest: str) -> tuple[str, str]:
    from packaging.version import InvalidVersion, Version

    match = _VERSION.match(rest)
    try:
        version = str(Version(match.group() if match else rest))
    except InvalidVersion:
        raise ConfigError(
            f"version of {library.distribution}", asked=repr(rest), allowed="a PEP 440 version, as in ==3.6.0"
        ) from None
    if sign == "-":
        raise ConfigError(
            "a removed library has no version",
            asked=f"-{library.distribution}=={version}",
            allowed=f"-{library.distribution}, or +{library.distribution}=={version}",
        )
    assert match is not None
    return version, rest[match.end() :]


def _libraries(versions: dict[str, str | None], known: Mapping[str, Library]) -> dict[str, LibraryFacts]:
    owners = {module: name for name in versions for module in known[name].modules}
    return {name: _facts(known[name], version, versions, owners) for name, version in versions.items()}


def _facts(
    library: Library, version: str | None, versions: dict[str, str | None], owners: dict[str, str]
) -> LibraryFacts:
    own = tuple(module for module in library.modules if owners[module] == library.distribution)
    facts = LibraryFacts(library.distribution, version, own, LibraryState.UNKNOWN)
    for module in library.modules:
        if module not in own:
            reason = f"module {module} belongs to {owners[module]}, which was installed later"
            return replace(facts, reason=reason)
    return against_torch(library, facts, (), versions.get("torch"))
