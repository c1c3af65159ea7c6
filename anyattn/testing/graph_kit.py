"""`anyattn verify NAME --graphs`: each check of graphs on each thing that a backend declares for them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from anyattn import api
from anyattn.core.capabilities import BackendRecord, CapabilityRow, ModelKind
from anyattn.core.facts import HostFacts
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.select.libraries import library_reasons
from anyattn.core.traits import GraphSupport
from anyattn.detect import plugins
from anyattn.errors import AnyattnError, FeatureError, GraphError, SelectionError
from anyattn.testing.checks import Skip
from anyattn.testing.graph_checks import GRAPH_CHECKS, Labs, run_graph_check
from anyattn.testing.graph_hooks import HookedPlatform
from anyattn.testing.graph_lab import GraphLab
from anyattn.testing.graph_setup import GraphSetup, setups
from anyattn.testing.selecting import facts_of, refuse_broken

__all__ = ["GraphResult", "GraphSubject", "graph_subject", "run_graphs", "run_setup", "verifying_platform"]

_KINDS = (ModelKind.DENSE, ModelKind.MLA)


@dataclass(frozen=True)
class GraphResult:
    """One check on one setup. `skipped`: why it doesn't apply."""

    setup: str
    check: str
    faults: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """It ran, and found nothing."""
        return not self.faults and not self.skipped

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class GraphSubject:
    """The backend under test. `host` is decided for, if it isn't this machine as torch sees it; `buckets`:
    others than the setups', for speed; `plugin`: the platform that a plugin brought and this runs on.
    """

    record: BackendRecord
    facts: HostFacts
    device: str
    host: str | None = None
    kinds: tuple[ModelKind, ...] = _KINDS
    buckets: tuple[int, ...] = ()
    plugin: str = ""

    @property
    def emulated(self) -> bool:
        """Decided for a chip that isn't here."""
        return self.host is not None and not self.plugin

    @property
    def large(self) -> bool:
        """Models and contexts for a device, and a hundred replays."""
        return torch.device(self.device).type != "cpu"

    def setups(self) -> list[GraphSetup]:
        """All of `kinds` that have an adapter, as declared for this chip."""
        found = [
            setup
            for kind in self.kinds
            if kind in self.record.targets
            for setup in setups(self._rows(kind), latent=kind is ModelKind.MLA, large=self.large)
        ]
        if not self.buckets:
            return found
        return [replace(s, sizes=replace(s.sizes, buckets=self.buckets)) for s in found]

    def _rows(self, kind: ModelKind) -> tuple[CapabilityRow, ...]:
        rows = tuple(r for r in self.record.rows if kind in r.kinds and r.serves(self.facts.target))
        return tuple(row for row in rows if not library_reasons(row, self.facts)) or rows

    def labs(self, setup: GraphSetup, replays: int | None = None, seed: int = 0) -> Labs:
        """What the checks of one setup run on."""

        def make() -> GraphLab:
            platform = HookedPlatform(verifying_platform(self.device, self.plugin))
            return GraphLab(setup, self.record.name, self.device, platform, self.host, seed)

        return Labs(make, (100 if self.large else 8) if replays is None else replays)


def verifying_platform(device: str, plugin: str = "") -> GraphPlatform:
    """Graphs of the device, or of a `plugin`; on a CPU a recorder that spoils whatever a shared pool may."""
    from anyattn.platforms.graphs import graph_platform

    if plugin:
        return api.graph_platform(plugin, device)
    if torch.device(device).type != "cpu":
        return graph_platform(device)
    return RecorderPlatform(poison=True, seams=list(_seams()))


def _seams() -> Iterator[Any]:
    try:
        from anyattn.kernels.triton.recording import recording_launches
    except ImportError:  # no Triton here: nothing of it is launched
        return
    yield recording_launches


def graph_subject(
    backend: str, device: str, host: str | None = None, kinds: tuple[ModelKind, ...] = _KINDS
) -> GraphSubject:
    """The backend on this machine, or on an emulated `host` whose stand-ins are in place.

    Args:
        device: torch's, or the name of a plugin's platform whose tensors lie on another type of device.

    Raises:
        UnknownNameError: nobody registered that name. SelectionError: its plugin is broken.
        GraphError: it declares no graphs on this chip, or the plugin's platform has none.
    """
    record = api.registry().get(backend)
    refuse_broken(record)
    subject = _subject(record, device, host, kinds)
    if not subject.setups():
        chips = sorted({a for row in record.rows if row.graph for a in row.architectures})
        raise GraphError(
            f"{record.name} declares no graphs on {subject.facts.target}",
            asked=f"graphs of {record.name}",
            allowed=", ".join(chips) or "no chip: it can't be captured as a whole",
            hint="run it eagerly, or choose a backend that declares graphs (`anyattn backends --json`)",
        )
    return subject


def _subject(
    record: BackendRecord, device: str, host: str | None, kinds: tuple[ModelKind, ...]
) -> GraphSubject:
    facts = facts_of(device, host)
    platform = next((p for p in plugins().brought() if p.name == facts.platform), None)
    if host is not None or platform is None:
        return GraphSubject(record, facts, device, host, kinds)
    if not platform.graph:
        raise GraphError(
            f"platform {platform.name} has no graphs",
            asked=f"graphs of {record.name} on {facts.target}",
            allowed="a platform whose record names a GraphPlatform",
            hint=f"graph='module:Class' in the record of {platform.origin}, or run eagerly",
        )
    plugged = api.plugin_host(device)
    where = device if plugged is None else api.device_type(platform.name)
    return GraphSubject(record, facts, where, plugged, kinds, plugin=platform.name)


def run_graphs(
    subject: GraphSubject,
    checks: Iterable[str] = tuple(GRAPH_CHECKS),
    replays: int | None = None,
    seed: int = 0,
    done: Callable[[GraphResult], None] | None = None,
    workers: int = 1,
) -> list[GraphResult]:
    """Every check on every setup, in processes of their own where `workers` are more than one: kernels are
    compiled side by side then. Stand-ins and interpreters are in this process alone: on a CPU, one worker.
    """
    if workers > 1 and subject.large and not subject.emulated:
        return _in_processes(subject, tuple(checks), replays, seed, done, workers)
    results = []
    for setup in subject.setups():
        for result in run_setup(subject, setup, checks, replays, seed):
            results.append(result)
            if done is not None:
                done(result)
    return results


def _in_processes(
    subject: GraphSubject, checks: tuple[str, ...], replays: int | None, seed: int,
    done: Callable[[GraphResult], None] | None, workers: int,
) -> list[GraphResult]:  # fmt: skip
    context = multiprocessing.get_context("spawn")  # a forked child can't use the device
    results = []
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        count = len(subject.setups())
        for found in pool.map(partial(_numbered, subject, checks, replays, seed), range(count)):
            for result in found:
                results.append(result)
                if done is not None:
                    done(result)
    return results


def _numbered(
    subject: GraphSubject, checks: tuple[str, ...], replays: int | None, seed: int, number: int
) -> list[GraphResult]:
    return list(run_setup(subject, subject.setups()[number], checks, replays, seed))


def run_setup(
    subject: GraphSubject,
    setup: GraphSetup,
    checks: Iterable[str],
    replays: int | None = None,
    seed: int = 0,
) -> Iterator[GraphResult]:
    """The checks of one setup; what the backend refuses to build or capture is skipped with its reason."""
    labs = subject.labs(setup, replays, seed)
    try:
        if labs.lab.traits.graph is GraphSupport.NEVER:
            yield GraphResult(setup.name, "capture", skipped="the row that serves this model has no graphs")
            return
        _ = labs.runner
    except (SelectionError, FeatureError) as error:
        yield GraphResult(setup.name, "capture", skipped=_line(error))
        if setup.window is not None and setup.sinks:
            yield from run_setup(subject, replace(setup, sinks=False), checks, replays, seed)
        return
    except Exception as error:
        yield GraphResult(setup.name, "capture", (_line(error),))
        return
    for check in checks:
        yield _checked(labs, setup, check)


def _checked(labs: Labs, setup: GraphSetup, check: str) -> GraphResult:
    begin = time.perf_counter()
    faults: tuple[str, ...] = ()
    skipped = ""
    try:
        with torch.no_grad():
            faults = tuple(run_graph_check(check, labs))
    except Skip as reason:
        skipped = str(reason)
    except Exception as error:  # a fault may show as any exception
        faults = (_line(error),)
    return GraphResult(setup.name, check, faults, skipped, time.perf_counter() - begin)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AnyattnError) else f"{type(error).__name__}: {text}"
