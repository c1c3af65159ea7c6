"""What `anyattn doctor` finds out, as plain data. Imports no torch and survives whatever is broken."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyattn.core.facts import HostFacts, LibraryState
from anyattn.core.measure.use import TableUse
from anyattn.detect import KNOWN, Library, PluginReport, ProbeReport, plugins

if TYPE_CHECKING:
    from anyattn.core.capabilities import BackendRecord
    from anyattn.core.select.decision import Reason, Verdict

__all__ = ["BackendStatus", "Diagnosis", "LibraryStatus", "backend_statuses", "library_statuses"]


@dataclass(frozen=True)
class LibraryStatus:
    """One library: `state` is missing, installed (nobody imported it), usable, broken, shadowed or blocked.

    Blocked: it can't compile its kernels here, whether or not it imports.
    """

    distribution: str
    state: str
    version: str | None
    provides: str
    modules: tuple[str, ...] = ()
    reason: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class BackendStatus:
    """One backend: `status` is ready, lacking, not_built or other_hardware.

    `phases` are those that this machine can run; `reasons` (code, asked, allowed, hint) say what the
    nearest row lacks, `missing` the same in a phrase.
    """

    backend: str
    status: str
    summary: str
    phases: tuple[str, ...] = ()
    missing: str | None = None
    remedy: str | None = None
    reasons: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Everything that doctor prints. `problems` stand in the way of every backend."""

    host: HostFacts
    torch: LibraryStatus
    libraries: tuple[LibraryStatus, ...]
    backends: tuple[BackendStatus, ...]
    probed: bool
    problems: tuple[str, ...]
    next_steps: tuple[str, ...]
    notes: tuple[str, ...] = ()
    plugins: tuple[PluginReport, ...] = ()
    measured: tuple[TableUse, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        from anyattn.core.select.codec import to_plain

        plain: dict[str, Any] = to_plain(self)
        machine = plain.pop("host")
        machine.pop("libraries")
        return {"schema": 1, "machine": machine, **plain}


def library_statuses(host: HostFacts, reports: Iterable[ProbeReport] = ()) -> tuple[LibraryStatus, ...]:
    """torch first, then what this platform may want, and whatever else is installed of the known ones.

    Other builds of a library are listed only where they are installed.
    """
    probed = {report.facts.distribution: report for report in reports}
    wanted = [
        library
        for library in _known(host).values()
        if (host.platform in library.platforms and library.simulated)
        or library.distribution in host.libraries
        or library.distribution == "torch"
    ]
    return tuple(_library(library, host, probed.get(library.distribution)) for library in wanted)


def _known(host: HostFacts) -> Mapping[str, Library]:
    """Plugins' libraries too, where the host was looked at with plugins at all."""
    return KNOWN if set(host.libraries) <= set(KNOWN) else plugins().known()


def _library(library: Library, host: HostFacts, report: ProbeReport | None) -> LibraryStatus:
    facts = report.facts if report else host.library(library.distribution)
    status = LibraryStatus(
        library.distribution, facts.state.value, facts.version, library.provides, facts.modules, facts.reason
    )
    if facts.state is LibraryState.MISSING:
        return replace(status, remedy=library.remedy)
    if facts.state is LibraryState.BROKEN:
        return replace(status, remedy=report.remedy if report else library.remedy)
    if set(facts.modules) != set(library.modules):
        again = f"pip install --force-reinstall --no-deps {library.distribution}=={facts.version}"
        return replace(status, state="shadowed", remedy=again)
    if facts.block is not None:
        return replace(status, state="blocked", reason=facts.block.detail, remedy=facts.block.remedy)
    return replace(status, state="installed" if facts.state is LibraryState.UNKNOWN else status.state)


def backend_statuses(
    records: Iterable[BackendRecord], host: HostFacts, torch: LibraryStatus
) -> tuple[BackendStatus, ...]:
    """What each backend lacks on this machine, for the phase in which it lacks least."""
    return tuple(_backend(record, host, torch) for record in records)


def _backend(record: BackendRecord, host: HostFacts, torch: LibraryStatus) -> BackendStatus:
    from anyattn.core.capabilities import Phase
    from anyattn.core.select.decision import ReasonCode, Rejected
    from anyattn.core.select.validate import distance, host_verdict

    verdicts = {phase: host_verdict(record, phase, host) for phase in Phase}
    phases = tuple(p.value for p, verdict in verdicts.items() if not isinstance(verdict, Rejected))
    status = BackendStatus(record.name, "ready", record.summary, phases)
    if phases and torch.state in ("missing", "broken"):
        missing = f"torch is {torch.state}"
        return replace(status, status="lacking", phases=(), missing=missing, remedy=torch.remedy)
    nearest = min(verdicts.values(), key=distance)
    if not isinstance(nearest, Rejected):
        return replace(status, missing=_degraded(nearest))
    codes = {reason.code for reason in nearest.reasons}
    kind = "lacking"
    if codes & {ReasonCode.ARCHITECTURE, ReasonCode.PHASE, ReasonCode.MODEL_KIND}:
        kind = "other_hardware"
    elif ReasonCode.NOT_BUILT in codes:
        kind = "not_built"
    return replace(
        status,
        status=kind,
        missing="; ".join(_phrase(reason) for reason in nearest.reasons),
        remedy=_remedy(nearest.reasons) if kind == "lacking" else None,
        reasons=tuple(_reason(reason) for reason in nearest.reasons),
    )


def _degraded(verdict: Verdict) -> str | None:
    from anyattn.core.select.decision import Degraded

    return f"degraded: {verdict.reason.allowed}" if isinstance(verdict, Degraded) else None


def _remedy(reasons: Iterable[Reason]) -> str | None:
    """A line that mends the first reason: pip's where it is about a library, else the reason's own hint."""
    for reason in reasons:
        if reason.code.value == "library_blocked":
            return reason.hint.partition(": ")[2]
        if reason.code.value.startswith("library_"):
            wanted = reason.allowed.partition(" or ")[0]
            library = KNOWN.get(re.split(r"[^a-z0-9-]", wanted, maxsplit=1)[0])
            if library and (reason.code.value == "library_missing" or library.install[:1].isupper()):
                return library.remedy
            return f"pip install '{wanted}'" if library else reason.hint
    return next((reason.hint for reason in reasons if reason.hint), None)


def _phrase(reason: Reason) -> str:
    if reason.code.value == "not_built":
        return "no adapter yet"
    words = reason.code.value.replace("_", " ")
    return f"{words}: {reason.asked}, wants {reason.allowed}"


def _reason(reason: Reason) -> dict[str, str]:
    return {"code": reason.code.value, "asked": reason.asked, "allowed": reason.allowed, "hint": reason.hint}
