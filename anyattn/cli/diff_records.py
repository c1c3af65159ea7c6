"""What changed between two decisions, or two machines: fact -> (old, new)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["decision_changes", "host_changes"]

Changes = dict[str, tuple[Any, Any]]

_PHASES = ("prefill", "mixed", "decode", "verify", "draft")
_CHOICE = ("backend", "method", "kernel_page", "how", "verdict")
_MACHINE = ("platform", "arch", "device_name", "device_count", "memory_bytes", "num_units", "driver",
            "runtime", "python", "torch", "torch_build")  # fmt: skip


def _different(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Changes:
    """Keys of either side whose values differ."""
    found = {f"{prefix}{key}": (old.get(key), new.get(key)) for key in {**old, **new}}
    return {what: pair for what, pair in found.items() if pair[0] != pair[1]}


def decision_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Request, pool, choices, routes, verdicts on candidates, versions and the machine."""
    found = _different(old["request"], new["request"], "request ")
    found |= _different(old["kv"], new["kv"], "KV ")
    for phase in _PHASES:
        found |= _different(_choice(old.get(phase)), _choice(new.get(phase)), f"{phase} ")
    found |= _different(_routes(old), _routes(new), "route of ")
    found |= _different(_verdicts(old), _verdicts(new))
    found |= _different(old.get("versions") or {}, new.get("versions") or {}, "version of ")
    return found | host_changes(old["host"], new["host"])


def _choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if choice is None else {name: choice.get(name) for name in _CHOICE}


def _routes(decision: Mapping[str, Any]) -> dict[str, Any]:
    routes = decision.get("routes") or ()
    return {r.get("role") or r["phase"]: [m["backend"] for m in r["members"]] for r in routes}


def _verdicts(decision: Mapping[str, Any]) -> dict[str, str]:
    """`candidate in phase` -> verdict, with its first reason."""
    found = {}
    for candidate in decision["candidates"]:
        reasons = candidate.get("reasons") or ()
        why = f" ({reasons[0]['code']}: {reasons[0]['asked']})" if reasons else ""
        found[f"{candidate['backend']} in {candidate['phase']}"] = f"{candidate['verdict']}{why}"
    return found


def host_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """The machine, its features, and versions and states of its libraries. Host facts, or doctor's JSON."""
    machines = old.get("machine", old), new.get("machine", new)
    own = [{name: machine.get(name) for name in _MACHINE} for machine in machines]
    features = [dict.fromkeys(machine.get("features") or (), "there") for machine in machines]
    found = _different(own[0], own[1]) | _different(features[0], features[1], "feature ")
    found |= _different(_libraries(old), _libraries(new), "library ")
    return found | _different(_backends(old), _backends(new), "backend ")


def _libraries(host: Mapping[str, Any]) -> dict[str, str]:
    """Distribution -> version and state; what is missing isn't listed."""
    listed = host.get("libraries") or {}
    entries = listed.values() if isinstance(listed, Mapping) else listed
    present = (entry for entry in entries if entry.get("state") != "missing")
    return {e["distribution"]: f"{e.get('version') or 'unknown version'}, {e['state']}" for e in present}


def _backends(host: Mapping[str, Any]) -> dict[str, str]:
    """Backend -> status, where doctor lists them."""
    return {entry["backend"]: entry["status"] for entry in host.get("backends") or ()}
