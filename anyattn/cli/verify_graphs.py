"""`anyattn verify NAME --graphs`: capture and replay of everything that a backend declares graphs for."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from anyattn.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyattn.testing.graph_kit import GraphResult, GraphSubject

__all__ = ["verify_graphs"]

_ELSEWHERE = ("full", "random", "write", "case")
"""Options of the other verifications, which say nothing here."""


def verify_graphs(args: argparse.Namespace, device: str) -> int:
    """Run and report; 1 if a check found a fault, a mutant survived, or nothing was captured.

    Raises:
        UnknownNameError, GraphError: as `graph_subject`. ConfigError: an option of another verification.
    """
    for name in _ELSEWHERE:
        if getattr(args, name):
            raise ConfigError(
                f"--{name} with --graphs",
                asked=f"--graphs --{name}",
                allowed="--device, --emulated, --assume, --latent, --cases (replays), --workers, --mutants",
                hint=f"leave --{name} out",
            )
    subject = _subject(args, device)
    if args.mutants:
        return _mutants(args, subject)
    from anyattn.testing.graph_kit import run_graphs

    results = run_graphs(subject, replays=args.cases, seed=args.seed, done=_told, workers=args.workers or 1)
    captured = any(result.passed for result in results)
    print(json.dumps(_document(subject, results), indent=2) if args.json else _text(subject, results))
    return 1 if not captured or any(result.faults for result in results) else 0


def _subject(args: argparse.Namespace, device: str) -> GraphSubject:
    from anyattn import api
    from anyattn.core.capabilities import ModelKind
    from anyattn.testing.graph_emulated import install_recordable
    from anyattn.testing.graph_kit import graph_subject
    from anyattn.testing.subject import needs_interpreter

    host: str | None = None
    kinds: tuple[ModelKind, ...] = (ModelKind.MLA,) if args.latent else (ModelKind.DENSE, ModelKind.MLA)
    if args.emulated:
        name = api.registry().get(args.backend).name
        latent = args.latent or ModelKind.DENSE not in api.registry().get(name).targets
        emulator = install_recordable(name, args.assume, latent=latent)
        host = args.assume or emulator.host
        kinds = (ModelKind.MLA,) if latent else (ModelKind.DENSE,)
    elif needs_interpreter(args.backend, device):
        _offer()
    return graph_subject(args.backend, device, host, kinds)


def _offer() -> None:
    """Our own kernels on a CPU: Triton's interpreter runs them."""
    from anyattn.testing.interpreter import offer_triton
    from anyattn.testing.mla_interpreter import offer_triton_mla

    offer_triton()
    offer_triton_mla()


def _told(result: GraphResult) -> None:
    """Progress: a line for each check, and for each fault as it is found."""
    how = "skipped" if result.skipped else "failed" if result.faults else "passed"
    print(f"{result.setup}: {result.check} {how} in {result.seconds:.0f} s", file=sys.stderr, flush=True)
    for fault in result.faults:
        print(f"FAILED {result.check} of {result.setup}: {fault}", file=sys.stderr, flush=True)


def _mutants(args: argparse.Namespace, subject: GraphSubject) -> int:
    from anyattn.testing.mutants.graph_hunt import hunt_graphs
    from anyattn.testing.mutants.hunt import hunt_text

    found = hunt_graphs(subject)
    print(json.dumps([caught.to_json() for caught in found], indent=2) if args.json else hunt_text(found))
    return 0 if all(caught.caught for caught in found) else 1


def _document(subject: GraphSubject, results: Sequence[GraphResult]) -> dict[str, object]:
    return {
        "backend": subject.record.name,
        "target": subject.facts.target,
        "device": subject.device,
        "emulated": subject.emulated,
        "passed": sum(result.passed for result in results),
        "failed": sum(bool(result.faults) for result in results),
        "skipped": sum(bool(result.skipped) for result in results),
        "results": [result.to_json() for result in results],
    }


def _text(subject: GraphSubject, results: Sequence[GraphResult]) -> str:
    lines: list[str] = []
    for setup in dict.fromkeys(result.setup for result in results):
        mine = [result for result in results if result.setup == setup]
        passed = [result.check for result in mine if result.passed]
        seconds = sum(result.seconds for result in mine)
        lines.append(f"{setup}: {len(passed)} passed in {seconds:.0f} s ({', '.join(passed) or 'none'})")
        lines += [f"  skipped {result.check}: {result.skipped}" for result in mine if result.skipped]
        lines += [f"  FAILED {result.check}: {fault}" for result in mine for fault in result.faults]
    passes = sum(result.passed for result in results)
    failed = sum(bool(result.faults) for result in results)
    how = ", emulated" if subject.emulated else ""
    recorded = subject.device == "cpu" and not subject.plugin
    graphs = "recorded on the CPU" if recorded else f"graphs of {subject.plugin or subject.device}"
    title = f"{subject.record.name} on {subject.facts.target}{how}, {graphs}"
    lines.append(f"{title}: {passes} passed, {failed} failed")
    return "\n".join(lines)
