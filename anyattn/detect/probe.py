"""Real probes: does a library import, and does it have the names that it is wanted for.

In a child process, because half of the libraries don't raise `ImportError` when they can't work: they
raise anything, exit, or crash. Results are kept per version in the cache folder.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.detect.cache import cache_folder, load, store
from anyattn.detect.child import Attempt, Outcome, attempt
from anyattn.detect.distributions import find
from anyattn.detect.host import detect_host
from anyattn.detect.known import KNOWN
from anyattn.detect.library import Library, normalise
from anyattn.detect.plugins import plugins
from anyattn.detect.remedies import remedy_for
from anyattn.detect.sources import Sources
from anyattn.errors import UnknownNameError

__all__ = ["Outcome", "ProbeReport", "kept_probes", "probe", "probe_all", "with_probes"]

SECONDS = 60.0
"""Default time for one library: FlashInfer takes 8 s on a laptop, more on a cold disk."""

_SILENT = (Outcome.MISSING, Outcome.SHADOWED)  # found without a child process


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found: facts with the state USABLE or BROKEN, the typed outcome, what to do about it.

    MISSING and SHADOWED leave the facts as the look-up had them. `note` says why nothing was cached.
    """

    facts: LibraryFacts
    outcome: Outcome
    detail: str = ""
    remedy: str | None = None
    seconds: float = 0.0
    cached: bool = False
    note: str | None = None


def probe(
    distribution: str | Library,
    host: HostFacts | None = None,
    *,
    timeout: float = SECONDS,
    sources: Sources | None = None,
    fresh: bool = False,
) -> ProbeReport:
    """Import a library in a child process and report how that went.

    Args:
        distribution: a name in `detect.known`, or the `Library` of a plugin. torch is imported even where
            another folder shadows its distribution: that is the torch which everything would get.
        host: this machine's facts; detected when absent.
        timeout: seconds for the child; a probe that runs out of time isn't cached.
        fresh: look even if a result is cached.

    Raises:
        UnknownNameError: the distribution isn't one that anyattn uses.
    """
    sources = sources or Sources()
    host = host or detect_host(sources=sources)
    library = _library(distribution)
    name, facts = library.distribution, host.library(library.distribution)
    if facts.state is LibraryState.MISSING:
        return ProbeReport(facts, Outcome.MISSING, "not installed", library.remedy)
    if set(facts.modules) != set(library.modules) and name != "torch":
        undo = remedy_for(library, facts, Attempt(Outcome.SHADOWED), host)
        return ProbeReport(facts, Outcome.SHADOWED, facts.reason or "another distribution's module", undo)
    return _probe(library, facts, host, timeout, sources, fresh)


def _library(wanted: str | Library) -> Library:
    if isinstance(wanted, Library):
        return wanted
    known = KNOWN if normalise(wanted) in KNOWN else plugins().known()
    if normalise(wanted) not in known:
        raise UnknownNameError("library", wanted, known)
    return known[normalise(wanted)]


def _probe(
    library: Library, facts: LibraryFacts, host: HostFacts, timeout: float, sources: Sources, fresh: bool
) -> ProbeReport:
    folder, key = cache_folder(sources.environ) / "probes", _key(library, facts, host, sources)
    kept = None if fresh else _restored(load(folder, library.distribution, key))
    result = kept or attempt(
        library.probe_imports,
        library.attributes,
        path=sys.path if sources.path is None else sources.path,
        environ=sources.environ,
        timeout=timeout,
    )
    note = None
    if kept is None and result.outcome not in (Outcome.TIMEOUT, Outcome.NOT_STARTED):
        note = store(folder, library.distribution, key, _plain(result))
    return _report(library, facts, host, result, cached=kept is not None, note=note)


def _report(
    library: Library, facts: LibraryFacts, host: HostFacts, result: Attempt, *, cached: bool, note: str | None
) -> ProbeReport:
    if result.outcome is Outcome.USABLE:
        facts = replace(facts, state=LibraryState.USABLE, modules=library.modules)
        return ProbeReport(facts, result.outcome, "", None, result.seconds, cached, note)
    shadow = f" ({facts.reason})" if facts.reason else ""
    detail = f"{result.step}: {result.detail}{shadow}" if result.step else result.detail
    facts = replace(facts, state=LibraryState.BROKEN, reason=detail)
    remedy = remedy_for(library, facts, result, host)
    return ProbeReport(facts, result.outcome, detail, remedy, result.seconds, cached, note)


def _key(library: Library, facts: LibraryFacts, host: HostFacts, sources: Sources) -> dict[str, Any]:
    """All that may change the result: versions, interpreter, driver, and what else is installed."""
    installed = find(library.distribution, sources.path)
    try:
        changed = os.stat(installed.folder).st_mtime_ns if installed else 0  # pip touches this folder
    except OSError:
        changed = 0
    return {
        "distribution": library.distribution,
        "version": facts.version,
        "torch": host.torch,
        "python": f"{platform.python_version()} {sys.executable}",
        "imports": [*library.probe_imports, *library.attributes],
        "machine": [host.target, host.driver, host.runtime],
        "environment": {name: sources.environ.get(name) for name in _WATCHED},
        "installed": changed,
    }


_WATCHED = ("LD_LIBRARY_PATH", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables that decide whether an import works."""


def _plain(result: Attempt) -> dict[str, Any]:
    return {
        "outcome": result.outcome.value,
        "step": result.step,
        "detail": result.detail,
        "missing": result.missing,
        "seconds": result.seconds,
    }


def _restored(data: Mapping[str, Any] | None) -> Attempt | None:
    if data is None:
        return None
    try:
        return Attempt(**{**data, "outcome": Outcome(data["outcome"])})
    except (KeyError, TypeError, ValueError):  # written by another version
        return None


def probe_all(
    host: HostFacts,
    names: Iterable[str] | None = None,
    *,
    timeout: float = SECONDS,
    sources: Sources | None = None,
    fresh: bool = False,
    done: Callable[[ProbeReport], None] = lambda report: None,
) -> tuple[ProbeReport, ...]:
    """Probe `names` (default: every library that is installed), a few at a time, in their order.

    `done` is called with each report as it comes.
    """
    wanted = tuple(host.libraries if names is None else names)
    workers = min(4, max(1, (os.cpu_count() or 1) // 2))

    def one(name: str) -> ProbeReport:
        report = probe(name, host, timeout=timeout, sources=sources, fresh=fresh)
        done(report)
        return report

    with ThreadPoolExecutor(workers) as pool:
        return tuple(pool.map(one, wanted))


def kept_probes(host: HostFacts, *, sources: Sources | None = None) -> tuple[ProbeReport, ...]:
    """Results of earlier probes that still hold for this machine and these versions; probes nothing."""
    sources = sources or Sources()
    folder = cache_folder(sources.environ) / "probes"
    reports = []
    for name, facts in host.libraries.items():
        library = KNOWN.get(name)
        if library is None or set(facts.modules) != set(library.modules):
            continue
        result = _restored(load(folder, name, _key(library, facts, host, sources)))
        if result is not None:
            reports.append(_report(library, facts, host, result, cached=True, note=None))
    return tuple(reports)


def with_probes(host: HostFacts, reports: Iterable[ProbeReport]) -> HostFacts:
    """`host` with the states that the probes found."""
    probed = {r.facts.distribution: r.facts for r in reports if r.outcome not in _SILENT}
    return replace(host, libraries={**host.libraries, **probed})
