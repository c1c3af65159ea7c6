"""Library facts by targeted look-ups: is the distribution there, which version, does it own its modules.

Nothing is imported. `importlib.metadata.packages_distributions()` would read every RECORD of the
environment; asking for the names in `detect.known` takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyattn.core.facts import LibraryFacts, LibraryState
from anyattn.detect.distributions import Claim, Installed, every, find, locate
from anyattn.detect.known import KNOWN
from anyattn.detect.library import Library, normalise
from anyattn.detect.sources import Sources

__all__ = ["against_torch", "read_libraries", "read_library"]


def read_libraries(
    sources: Sources, torch: str | None, known: Iterable[Library]
) -> tuple[dict[str, LibraryFacts], tuple[str, ...]]:
    """Facts of those of the `known` libraries that are installed, by normalised distribution name, and notes.

    `torch` is torch's version, None if it isn't installed. Never raises: what can't be read is a note.
    """
    found: dict[str, LibraryFacts] = {}
    notes: list[str] = []
    for library in known:
        try:
            facts = read_library(library, sources, torch)
            notes += [] if facts else _strangers(library, sources)
        except Exception as error:  # odd metadata of any kind mustn't stop detection
            notes.append(f"{library.distribution} can't be looked up: {type(error).__name__}: {error}")
            continue
        if facts:
            found[library.distribution] = facts
    return found, tuple(notes)


def read_library(library: Library, sources: Sources, torch: str | None) -> LibraryFacts | None:
    """Facts of one library, None when neither it nor an alias of it is installed."""
    first = None
    for name in (library.distribution, *library.aliases):
        installed = find(name, sources.path)
        if installed is None:
            continue
        facts = _facts(library, installed, sources)
        if name != library.distribution and facts.reason is None:
            facts = replace(facts, reason=f"provided by {name}")
        facts = against_torch(library, facts, installed.field("Requires-Dist"), torch)
        if facts.modules:
            return facts
        first = first or facts
    return first


def _facts(library: Library, installed: Installed, sources: Sources) -> LibraryFacts:
    facts = LibraryFacts(library.distribution, installed.version)
    if facts.version is None:
        return replace(facts, state=LibraryState.BROKEN, reason="its metadata is unreadable: reinstall it")
    lost = {module: loss for module in library.modules if (loss := _loss(module, installed, sources))}
    facts = replace(facts, modules=tuple(module for module in library.modules if module not in lost))
    for loss in lost.values():  # one is enough to say
        known = loss.owner is not None and normalise(loss.owner) in KNOWN
        state = LibraryState.UNKNOWN if known else LibraryState.BROKEN
        return replace(facts, state=state, reason=loss.reason)
    return facts


@dataclass(frozen=True)
class _Loss:
    """Why a module isn't its distribution's, and which distribution has it, where one has."""

    reason: str
    owner: str | None = None


def _loss(module: str, installed: Installed, sources: Sources) -> _Loss | None:
    """None when `module` is this distribution's."""
    loaded = locate(module, sources.path)
    if loaded is None:
        return _Loss(f"module {module} isn't on disk: reinstall it")
    claim = installed.claim(module)
    if claim is None:
        return _Loss(f"its RECORD doesn't list module {module}") if installed.lists_files else None
    if not claim.file.exists():
        return _Loss(f"module {module} isn't where it was installed: reinstall it")
    if not claim.file.samefile(loaded) and claim.file.parent != loaded:
        return _Loss(f"module {module} is shadowed by {loaded}, which comes earlier on sys.path")
    owner = _overwriter(module, claim, installed, sources)
    return _Loss(f"module {module} belongs to {owner}, which was installed later", owner) if owner else None


def _overwriter(module: str, claim: Claim, installed: Installed, sources: Sources) -> str | None:
    """The other distribution whose file is on disk in place of this one's, None if it is this one's."""
    intact = claim.holds()
    # Anybody may have written a changed file; a rival with the very same file wins by being newer.
    rivals = _rivals(module, installed, sources) if intact else every(sources.path)
    for rival in rivals:
        other = rival.claim(module)
        if other is None or normalise(rival.name) == normalise(installed.name):
            continue
        newer = rival.installed_at > installed.installed_at
        if other.file == claim.file and other.holds() and (newer or not intact):
            return rival.name
    return None  # intact, or changed by hand


def _rivals(module: str, installed: Installed, sources: Sources) -> list[Installed]:
    """Installed distributions that are known to ship the same module."""
    names = {
        name
        for library in KNOWN.values()
        if module in library.modules
        for name in (library.distribution, *library.aliases, *library.strangers)
    }
    found = (find(name, sources.path) for name in sorted(names - {normalise(installed.name)}))
    return [rival for rival in found if rival]


def against_torch(
    library: Library, facts: LibraryFacts, requirements: Iterable[str], torch: str | None
) -> LibraryFacts:
    """Compare with the torch that is there: a known failure is BROKEN, an unmet pin only a reason."""
    if torch is None or library.distribution == "torch":
        return facts
    if library.torch and not _inside(torch, library.torch):
        reason = f"works with torch {library.torch} only, this is {torch}"
        return replace(facts, state=LibraryState.BROKEN, reason=reason)
    for requirement in requirements:
        pin = _torch_pin(requirement)
        if pin and not _inside(torch, pin) and facts.reason is None:
            return replace(facts, reason=f"was built for torch {pin}, this is {torch}: probe it")
    return facts


def _torch_pin(requirement: str) -> str:
    """The version range of a requirement on torch itself, empty for any other."""
    from packaging.requirements import InvalidRequirement, Requirement

    if not requirement.startswith("torch"):
        return ""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return ""
    if parsed.name != "torch" or (parsed.marker and not parsed.marker.evaluate({"extra": ""})):
        return ""
    return str(parsed.specifier)


def _inside(version: str, versions: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):  # what can't be compared isn't held against it
        return True


def _strangers(library: Library, sources: Sources) -> list[str]:
    """A note for each unrelated distribution that would answer to this library's module name."""
    return [
        f"{name} {other.version or ''} is installed: its module {library.modules[0]} is not "
        f"{library.distribution}'s and doesn't count"
        for name in library.strangers
        if (other := find(name, sources.path))
    ]
