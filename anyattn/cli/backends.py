"""`anyattn backends`: every backend in every phase on this host or an assumed one, and why not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyattn import env
from anyattn.cli.select import add_host_arguments, add_model_arguments, model_given, spec_of
from anyattn.core.capabilities import BackendRecord, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.codec import to_plain
from anyattn.core.select.decision import Accepted, Degraded, Reason, ReasonCode, Rejected, Verdict
from anyattn.core.select.explain import describe_host, describe_model, why
from anyattn.core.select.request import Request
from anyattn.core.select.validate import host_verdict, validate

__all__ = ["add_arguments", "run"]

Verdicts = Mapping[Phase, Verdict]
Matrix = Sequence[tuple[BackendRecord, Verdicts]]

_WIDTH = 72
_LEGEND = "yes: runs   slow: right, but second-rate   -: can't   *: no adapter in this version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `anyattn backends`."""
    add_host_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--why", metavar="NAME", help="all reasons for one backend, with remedies")
    parser.add_argument("--json", action="store_true", help="print verdicts and reasons as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the matrix. Without options that describe a model, it tells what the host could run at all."""
    from anyattn import api

    env.check_environment()
    facts = api.host_facts(args.device, args.assume)
    registry = api.registry()
    records = registry.records() if args.why is None else (registry.get(args.why),)
    request = _request(args) if model_given(args) else None
    matrix = [(record, _verdicts(record, request, facts)) for record in records]
    if args.json:
        print(json.dumps(_as_json(matrix, request, facts), indent=2))
    else:
        body = (_details if args.why else _table)(matrix)
        print("\n".join([*_title(request, facts), *body, *_plugin_lines()]))
    return 0


def _request(args: argparse.Namespace) -> Request:
    from anyattn import api

    return api.make_request(
        spec_of(args),
        dtype=args.dtype or "bfloat16",
        kv_dtype=args.kv_dtype,
        page_size=args.page_size,
        layout=args.layout,
        deterministic=args.deterministic,
        features=args.feature,
        kind=args.kind,
    )


def _verdicts(record: BackendRecord, request: Request | None, facts: HostFacts) -> Verdicts:
    judge: Callable[[Phase], Verdict] = (
        (lambda phase: host_verdict(record, phase, facts))
        if request is None
        else (lambda phase: validate(record, phase, request, facts))
    )
    return {phase: judge(phase) for phase in Phase}


def _title(request: Request | None, facts: HostFacts) -> list[str]:
    model = "for some model" if request is None else f"for {describe_model(request)}"
    return [f"Backends on {describe_host(facts)}, {model}", ""]


def _cell(record: BackendRecord, verdict: Verdict) -> str:
    if isinstance(verdict, Rejected):
        return "-"
    return ("slow" if isinstance(verdict, Degraded) else "yes") + ("" if record.targets else "*")


def _table(matrix: Matrix) -> list[str]:
    """Backends that do something first; the reason is that of the first phase that isn't a yes."""
    width = max(len(record.name) for record, _ in matrix) + 2
    head = "".join(f"{phase.value:9}" for phase in Phase)
    rows = sorted(matrix, key=lambda item: all(isinstance(v, Rejected) for v in item[1].values()))
    lines = [
        f"{record.name:{width}}"
        + "".join(f"{_cell(record, verdict):9}" for verdict in verdicts.values())
        + _cut(_first_reason(verdicts))
        for record, verdicts in rows
    ]
    foot = ["", _LEGEND, "`anyattn backends --why NAME` gives all reasons and what to do"]
    return [f"{'':{width}}{head}", *(line.rstrip() for line in lines), *foot]


def _plugin_lines() -> list[str]:
    """Plugins that can't be used, with the remedy; a plugin that merely isn't for this host isn't one."""
    from anyattn.detect import plugins

    return [line for report in plugins().faults for line in ("", str(report))]


def _first_reason(verdicts: Verdicts) -> str:
    """Of the first phase that isn't a yes; where nothing works, of one that the backend has kernels for."""
    bad = [v for v in verdicts.values() if not isinstance(v, Accepted)]
    if len(bad) == len(verdicts):
        bad.sort(key=lambda v: isinstance(v, Rejected) and v.reasons[0].code is ReasonCode.PHASE)
    return why(bad[0]) if bad else ""


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _details(matrix: Matrix) -> list[str]:
    lines = []
    for record, verdicts in matrix:
        kinds = ", ".join(sorted(k.value for k in record.row_kinds()))
        built = ", ".join(sorted(k.value for k in record.targets)) or "none yet"
        lines += [f"{record.name}: {record.summary}", f"  models: {kinds}; adapters: {built}"]
        if record.deprecated_aliases:
            lines.append(f"  old names: {', '.join(record.deprecated_aliases)}")
        for phase, verdict in verdicts.items():
            lines.append(f"  {phase.value:8} {_cell(record, verdict)}")
            lines += [f"    {line}" for reason in _reasons(verdict) for line in _told(reason)]
    return lines


def _reasons(verdict: Verdict) -> Sequence[Reason]:
    if isinstance(verdict, Degraded):
        return (verdict.reason,)
    return verdict.reasons if isinstance(verdict, Rejected) else ()


def _told(reason: Reason) -> list[str]:
    lines = [f"{reason.code.value}: asked {reason.asked}", f"  allowed: {reason.allowed}"]
    return [*lines, f"  next: {reason.hint}"] if reason.hint else lines


def _as_json(matrix: Matrix, request: Request | None, facts: HostFacts) -> dict[str, Any]:
    from anyattn.detect import plugins

    backends = [
        {
            "backend": record.name,
            "summary": record.summary,
            "origin": record.origin,
            "deprecated_aliases": list(record.deprecated_aliases),
            "kinds": sorted(k.value for k in record.row_kinds()),
            "adapters": {kind.value: target for kind, target in record.targets.items()},
            "phases": {
                phase.value: {"verdict": v.kind, "reasons": to_plain(_reasons(v))}
                for phase, v in verdicts.items()
            },
        }
        for record, verdicts in matrix
    ]
    return {
        "host": to_plain(facts),
        "request": None if request is None else request.to_json(),
        "backends": backends,
        "plugins": to_plain(plugins().reports),
    }
