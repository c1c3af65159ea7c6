"""The decision record, with its verdicts: plain data, JSON both ways."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyattn.core.capabilities import CapabilityRow, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import Role
from anyattn.core.measure.rules import RouteMap, RouteRule
from anyattn.core.measure.use import TableUse
from anyattn.core.select.codec import from_plain, to_plain
from anyattn.core.select.request import Request
from anyattn.core.select.verdict import (
    Accepted,
    Degraded,
    Reason,
    ReasonCode,
    Rejected,
    Verdict,
    verdict_from_json,
    verdict_to_json,
)
from anyattn.errors import ConfigError, SelectionError

__all__ = ["SCHEMA", "Accepted", "Candidate", "Decision", "Degraded", "KVChoice", "PhaseChoice", "Reason",
           "ReasonCode", "Rejected", "Route", "Verdict"]  # fmt: skip

SCHEMA = 1
"""Version of the JSON that `Decision.to_json` writes."""


@dataclass(frozen=True)
class PhaseChoice:
    """Who serves one phase, and why.

    `target` is the lazy path of the class, None where no adapter exists (`built` False, simulated hosts
    only). `kernel_page` is what its kernel reads; the pool's page is a multiple. `how` is one of explicit,
    environment, pinned, measured, priority, only.
    """

    backend: str
    target: str | None
    method: str
    built: bool
    kernel_page: int
    how: str
    verdict: Verdict
    row: CapabilityRow
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        data: dict[str, Any] = to_plain(self)
        return data | verdict_to_json(self.verdict)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PhaseChoice:
        """The choice that `to_json` wrote."""
        fields = {name: value for name, value in data.items() if name != "reasons"}
        row = from_plain(CapabilityRow, data["row"])
        return PhaseChoice(**{**fields, "row": row, "verdict": verdict_from_json(data)})


@dataclass(frozen=True)
class Route:
    """Steps of a role go to one of several backends on the pool, by size; unknown ones to the first.

    `table`: the measured table that the rules are rows of.
    """

    role: Role
    members: tuple[PhaseChoice, ...]
    rules: tuple[RouteRule, ...]
    table: str = ""

    @property
    def map(self) -> RouteMap:
        """Looks a step up in the rules."""
        return RouteMap(self.members[0].backend, self.rules)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        members = [member.to_json() for member in self.members]
        head = {"role": self.role.value, "table": self.table}
        return head | {"members": members, "rules": to_plain(self.rules)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Route:
        """The route that `to_json` wrote, or that of an older decision, whose roles were phases."""
        members = tuple(map(PhaseChoice.from_json, data["members"]))
        role = Role(data["role"] if "role" in data else data["phase"])
        return Route(role, members, from_plain(tuple[RouteRule, ...], data["rules"]), data.get("table", ""))


@dataclass(frozen=True)
class KVChoice:
    """The one KV pool that all phases share: tokens a page, layout, element type."""

    page_size: int
    layout: str
    dtype: str


@dataclass(frozen=True)
class Candidate:
    """One backend in one phase: its verdict, and whether its library imports (`unknown` until probed)."""

    backend: str
    phase: Phase
    verdict: Verdict
    importable: str
    built: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "backend": self.backend,
            "phase": self.phase.value,
            **verdict_to_json(self.verdict),
            "importable": self.importable,
            "built": self.built,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        """The candidate that `to_json` wrote."""
        phase, verdict = Phase(data["phase"]), verdict_from_json(data)
        return Candidate(data["backend"], phase, verdict, data["importable"], data["built"])


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What was chosen for one request on one host, how, and why nothing else was.

    `verify` and `draft` are None where no backend can take the role; the decision stands without them.
    `candidates` holds a verdict for every backend and phase; `versions` what the choice ran on. `routes`:
    roles whose steps go to several backends; `measured`: tables that were looked at, used or why not.
    `mixed`: who takes mixed steps, where that isn't the backend of prefill.
    """

    schema: int
    request: Request
    host: HostFacts
    kv: KVChoice
    prefill: PhaseChoice
    decode: PhaseChoice
    verify: PhaseChoice | None
    draft: PhaseChoice | None
    candidates: tuple[Candidate, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    measured: tuple[TableUse, ...] = ()
    mixed: PhaseChoice | None = None

    def route(self, role: Phase | Role) -> Route | None:
        """How steps of a phase or role are routed; None = all go to `serving(…)`."""
        return next((route for route in self.routes if route.role.value == role.value), None)

    def serving(self, role: Role) -> PhaseChoice:
        """Who takes steps of a role, unless they are routed. Raises `SelectionError` as `phase`."""
        if role is Role.MIXED:
            return self.mixed or self.prefill
        return self.phase(Phase(role.value))

    def phase(self, phase: Phase) -> PhaseChoice:
        """The choice for a phase.

        Raises:
            SelectionError: no backend can take it.
        """
        choice: PhaseChoice | None = getattr(self, phase.value)
        if choice is None:
            raise SelectionError(
                f"no backend was found for {phase.value}",
                asked=phase.value,
                allowed=", ".join(p.value for p in Phase if getattr(self, p.value) is not None),
                hint=f"`print(decision)` says why; name one with {phase.value}=...",
            )
        return choice

    def to_json(self) -> dict[str, Any]:
        """Plain values, stable keys; `from_json` gives an equal decision."""
        phases = {p.value: getattr(self, p.value) for p in Phase}
        return {
            "schema": self.schema,
            "host": to_plain(self.host),
            "request": self.request.to_json(),
            "kv": to_plain(self.kv),
            **{name: None if choice is None else choice.to_json() for name, choice in phases.items()},
            "candidates": [c.to_json() for c in self.candidates],
            "mixed": None if self.mixed is None else self.mixed.to_json(),
            "routes": [route.to_json() for route in self.routes],
            "measured": to_plain(self.measured),
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "digest": self.digest(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Decision:
        """The decision that `to_json` wrote.

        Raises:
            ConfigError: another schema version, or missing fields.
        """
        schema = data.get("schema") if isinstance(data, Mapping) else f"a {type(data).__name__}"
        if schema != SCHEMA:
            hint = "decide again: `anyattn select ... --json`"
            raise ConfigError("schema of a decision", asked=repr(schema), allowed=SCHEMA, hint=hint)
        try:
            phases = {p.value: _optional_choice(data[p.value]) for p in Phase}
            decision = Decision(
                schema=SCHEMA,
                host=from_plain(HostFacts, data["host"]),
                request=Request.from_json(data["request"]),
                kv=from_plain(KVChoice, data["kv"]),
                candidates=tuple(Candidate.from_json(c) for c in data["candidates"]),
                versions=dict(data["versions"]),
                notes=tuple(data["notes"]),
                routes=tuple(map(Route.from_json, data.get("routes", ()))),
                measured=from_plain(tuple[TableUse, ...], data.get("measured", ())),
                mixed=_optional_choice(data.get("mixed")),
                **phases,  # type: ignore[arg-type]
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "JSON of a decision",
                asked=f"{type(error).__name__}: {error}",
                allowed="what Decision.to_json() writes",
                hint="decide again: `anyattn select ... --json`",
            ) from error
        return decision

    def digest(self) -> str:
        """16 hex digits, equal on all ranks that decided alike.

        Covers the request without its device index, the architecture, the pool, the classes chosen, their
        versions and routes. Leaves out what differs between ranks without meaning: device names, memory,
        paths.
        """
        request = self.request.to_json()
        request["device"] = self.request.device.partition(":")[0]
        phases = {p.value: _identity(getattr(self, p.value)) for p in Phase}
        head = {"schema": self.schema, "target": self.host.target, "kv": to_plain(self.kv)}
        body = head | phases | {"request": request, "versions": dict(self.versions)}
        body |= {f"route {r.role.value}": _route_identity(r) for r in self.routes}
        body |= {} if self.mixed is None else {"mixed": _identity(self.mixed)}
        text = json.dumps(body, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> str:
        """One line: machine, backends, pool."""
        from anyattn.core.select.explain import summary

        return summary(self)

    def __str__(self) -> str:
        from anyattn.core.select.explain import explain

        return explain(self)


def _identity(choice: PhaseChoice | None) -> list[Any] | None:
    if choice is None:
        return None
    return [choice.backend, choice.target, choice.method, choice.kernel_page]


def _route_identity(route: Route) -> list[Any]:
    return [[_identity(member) for member in route.members], to_plain(route.rules)]


def _optional_choice(data: Mapping[str, Any] | None) -> PhaseChoice | None:
    return None if data is None else PhaseChoice.from_json(data)
