"""The next step that a diagnosis leads to, most urgent first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyattn.cli.diagnosis import BackendStatus, LibraryStatus
from anyattn.core.facts import HostFacts
from anyattn.detect import KNOWN, PluginReport, PluginState, plugins

__all__ = ["next_steps"]

REFERENCE = "torch_native"


def next_steps(
    host: HostFacts,
    torch: LibraryStatus,
    libraries: Sequence[LibraryStatus],
    backends: Sequence[BackendStatus],
    *,
    probed: bool,
    plugged: Sequence[PluginReport] = (),
) -> tuple[str, ...]:
    """One to three lines, each a command or a sentence that ends in one."""
    if torch.state in ("missing", "broken"):
        return (f"make torch importable: {torch.remedy}",)
    steps = [note for note in host.notes if "can't drive it" in note]
    steps += [f"{s.distribution} is {s.state}: {s.remedy}" for s in libraries if _in_the_way(host, s)]
    broken = [r for r in plugged if r.state is PluginState.BROKEN]
    steps += [f"plugin {report.name} is broken: {report.fault.remedy}" for report in broken if report.fault]
    better = _better(host, backends)
    if better:
        steps.append(f"for {better.backend}, which this machine could run: {better.remedy}")
    if not probed and not host.simulated and any(s.state == "installed" for s in libraries):
        steps.append("anyattn doctor --probe shows whether the installed libraries really import")
    assume = f" --assume {host.target}" if host.simulated else ""
    steps.append(
        f"anyattn select{assume} --q-heads 32 --kv-heads 8 --head-dim 128 shows what is chosen and why"
    )
    return tuple(steps[:3])


def _in_the_way(host: HostFacts, status: LibraryStatus) -> bool:
    """A broken or blocked library of this platform; one that another build stands in for does no harm."""
    return status.state in ("broken", "blocked") and _is_for(host, status.distribution)


def _is_for(host: HostFacts, distribution: str) -> bool:
    """A plugin's library, which isn't known here, is for the machine that it is installed on."""
    library = KNOWN.get(distribution)
    return library is None or host.platform in library.platforms


def _better(host: HostFacts, backends: Sequence[BackendStatus]) -> BackendStatus | None:
    """The most preferred backend that lacks only what can be installed, if it beats what is ready."""
    order = _order(host) or [status.backend for status in backends]
    by_name = {status.backend: status for status in backends}
    for name in order:
        status = by_name.get(name)
        if status is None:
            continue
        if status.status == "ready" and name != REFERENCE:
            return None
        if status.status == "lacking" and status.remedy:
            return status
    return None


def _order(host: HostFacts) -> list[str]:
    """The platform's preference list for decoding a dense model, empty where it can't be read."""
    try:
        from anyattn.core.capabilities import ModelKind, Phase

        lists: Iterable[tuple[str, ...]] = (
            entry.order
            for entry in plugins().platform(host.platform).preferences
            if host.target in entry.architectures
            and entry.phase is Phase.DECODE
            and entry.kind is ModelKind.DENSE
        )
        return [name for order in lists for name in order]
    except Exception:  # advice is optional
        return []
