"""Order of backends that all pass: measured on this device, else preferred for it, else registered first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anyattn.core.capabilities import ModelKind, Phase, Preference
from anyattn.core.facts import HostFacts
from anyattn.core.select.explain import UNLISTED
from anyattn.core.select.request import Request
from anyattn.errors import ConfigError

__all__ = ["Measured", "Measurements", "Rank", "bucket", "load_measurements", "rank"]


@dataclass(frozen=True)
class Measured:
    """Median time of one backend in a bucket and its relative spread (0.05 = 5 %)."""

    seconds: float
    spread: float = 0.0


Measurements = Mapping[tuple[str, Phase, str], Mapping[str, Measured]]
"""(device name or `platform:arch`, phase, bucket) -> backend -> time."""

_ALSO = {Phase.VERIFY: Phase.PREFILL, Phase.DRAFT: Phase.DECODE}
"""Phases whose kernels are those of another: its list counts where they have none."""


@dataclass(frozen=True)
class Rank:
    """A backend's place in the order: how it got there, with evidence."""

    backend: str
    how: str
    evidence: str


def bucket(request: Request) -> str:
    """The shape bucket of a request: kind, dtypes and the largest layer's heads."""
    spec = max(request.specs, key=lambda s: (s.head_dim, s.num_q_heads))
    heads = f"h{spec.num_q_heads}/{spec.num_kv_heads}-d{spec.head_dim}/{spec.v_head_dim}"
    return f"{request.model_kind.value}-{request.dtype}-{request.kv_dtype}-{heads}"


def load_measurements(path: str | Path) -> Measurements:
    """A table written as JSON: a list of `{device, phase, bucket, backend, seconds, spread}`.

    Raises:
        ConfigError: the file can't be read or has other fields.
    """
    table: dict[tuple[str, Phase, str], dict[str, Measured]] = {}
    try:
        for item in json.loads(Path(path).read_text(encoding="utf-8")):
            key = (str(item["device"]), Phase(item["phase"]), str(item["bucket"]))
            measured = Measured(float(item["seconds"]), float(item.get("spread", 0.0)))
            table.setdefault(key, {})[str(item["backend"])] = measured
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("measurement table can't be read", asked=f"{path}: {error}") from error
    return table


def _preferred(
    phase: Phase, kind: ModelKind, facts: HostFacts, preferences: Sequence[Preference]
) -> dict[str, str]:
    """Backend -> evidence, best first, of the lists for this exact architecture."""
    found: dict[str, str] = {}
    for wanted in (phase, _ALSO.get(phase)):
        for entry in preferences:
            if (entry.phase, entry.kind) == (wanted, kind) and facts.target in entry.architectures:
                library = f", {entry.library}" if entry.library else ""
                for name in entry.order:
                    found.setdefault(name, f"{entry.evidence} ({entry.date}{library})")
        if found:
            break
    return found


def _by_time(times: Mapping[str, Measured], preferred: Sequence[str]) -> list[str]:
    """Fastest first. Times within the noise of the fastest are equal and keep the preferred order."""
    best = min(times.values(), key=lambda m: m.seconds)

    def key(name: str) -> tuple[float, int]:
        entry = times[name]
        noise = max(entry.spread, best.spread) * best.seconds
        return (0.0 if entry.seconds - best.seconds <= noise else entry.seconds, preferred.index(name))

    return sorted(times, key=key)


def rank(
    names: Sequence[str],
    phase: Phase,
    request: Request,
    facts: HostFacts,
    preferences: Sequence[Preference],
    measurements: Measurements | None = None,
) -> tuple[Rank, ...]:
    """Backends best first. `names` come in registration order, which decides where nothing else does.

    A measured table counts where it compares at least two of the names: one time alone says nothing.
    """
    listed = _preferred(phase, request.model_kind, facts, preferences)
    places = {name: i for i, name in enumerate(listed)}
    order = sorted(names, key=lambda n: places.get(n, len(places)))
    fallback = f"{UNLISTED} for {facts.target}: order of registration"
    ranks = {n: Rank(n, "priority", listed.get(n, fallback)) for n in order}
    table = measurements or {}
    devices = (facts.device_name, facts.target)
    found = next((table[k] for d in devices if (k := (d, phase, bucket(request))) in table), {})
    times = {n: found[n] for n in order if n in found}
    if len(times) < 2:
        return tuple(ranks.values())
    timed = [
        Rank(n, "measured", f"{times[n].seconds * 1e6:.0f} µs in bucket {bucket(request)}")
        for n in _by_time(times, order)
    ]
    return (*timed, *(r for n, r in ranks.items() if n not in times))
