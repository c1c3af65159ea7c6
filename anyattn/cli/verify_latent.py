"""`anyattn verify` on latent models (MLA): random steps of DeepSeek's sizes, judged by definition."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anyattn.errors import ConfigError

__all__ = ["serves_latents_alone", "verify_latents"]

_QUICK, _FULL = 60, 1500
_SHOWN = 10
_ELSEWHERE = {"random": None, "write": None}
"""Options of dense verification that say nothing here, and their defaults."""


def serves_latents_alone(backend: str, device: str, host: str | None) -> bool:
    """The backend has rows for this chip, and none of them for dense models.

    Raises:
        UnknownNameError: nobody registered that name.
    """
    from anyattn import api
    from anyattn.core.capabilities import ModelKind
    from anyattn.testing.selecting import facts_of

    target = facts_of(device, host).target
    kinds = {kind for r in api.registry().get(backend).rows if r.serves(target) for kind in r.kinds}
    return ModelKind.MLA in kinds and ModelKind.DENSE not in kinds


def verify_latents(args: argparse.Namespace, device: str, host: str | None) -> int:
    """Run and report; 1 if a case failed or none could run.

    Raises:
        UnknownNameError, SelectionError: as `latent_declared`. ConfigError: an option of the dense kit.
    """
    from anyattn import api
    from anyattn.testing.emulators import install
    from anyattn.testing.mla_declared import latent_declared
    from anyattn.testing.mla_sweep import spaces_of, sweep
    from anyattn.testing.report import versions_of
    from anyattn.testing.subject import needs_interpreter

    for name, default in _ELSEWHERE.items():
        if getattr(args, name) != default:
            raise ConfigError(
                f"--{name} on latent models",
                asked=f"--{name}",
                allowed="--quick, --full, --cases, --case, --seed, --workers, --mutants",
                hint=f"leave --{name} out, or --latent where the backend serves dense models too",
            )
    if host is not None:
        install(api.registry().get(args.backend).name, host, latent=True)
    elif needs_interpreter(args.backend, device):
        from anyattn.testing.mla_interpreter import offer_triton_mla

        offer_triton_mla()
    if args.mutants:
        return _mutants(args, device, host)
    if args.case is not None:
        return _one_case(args, device, host)
    declared = latent_declared(args.backend, device, host)
    count = args.cases or (_FULL if args.full else _QUICK)
    outcome = sweep(
        declared.record.name, device, count, args.seed, spaces_of(declared), host, args.workers or 1
    )
    outcome |= {"backend": declared.record.name, "target": declared.facts.target, "kind": "mla"}
    outcome |= {"name": declared.facts.device_name, "versions": versions_of(declared.rows)}
    print(json.dumps(outcome, indent=2) if args.json else _text(outcome, args, device))
    return 1 if outcome["failed"] or not outcome["cases"] else 0


def _mutants(args: argparse.Namespace, device: str, host: str | None) -> int:
    from anyattn.testing.mutants.hunt import hunt_text
    from anyattn.testing.mutants.latent import hunt_latents

    found = hunt_latents(args.backend, device, host)
    print(json.dumps([caught.to_json() for caught in found], indent=2) if args.json else hunt_text(found))
    return 0 if all(caught.caught for caught in found) else 1


def _one_case(args: argparse.Namespace, device: str, host: str | None) -> int:
    from anyattn.testing.mla_cases import parse_mla_case
    from anyattn.testing.mla_judge import check_mla_case

    report = check_mla_case(parse_mla_case(args.case), backend=args.backend, device=device, host=host)
    verdict = "passed" if report.passed else "failed"
    if args.json:
        print(json.dumps({"verdict": verdict, "error": report.error, "faults": report.faults}))
    else:
        print(f"{verdict}, {report}")
    return 0 if report.passed else 1


def _text(outcome: dict[str, Any], args: argparse.Namespace, device: str) -> str:
    again = f"anyattn verify {outcome['backend']} --latent --device {device}"
    if outcome["emulated"]:
        again += " --emulated" + (f" --assume {args.assume}" if args.assume else "")
    lines = []
    for failure in outcome["failed"][:_SHOWN]:
        lines += [f"FAILED {failure['why']}", f'  {again} --case "{failure["case"]}"']
    worst = ", ".join(f"{name} {error:.1e}" for name, error in outcome["worst"].items())
    how = ", emulated" if outcome["emulated"] else ""
    left = f", {outcome['left_out']} left out (dtypes or sizes not declared)" if outcome["left_out"] else ""
    failed = outcome["cases"] - outcome["passed"]
    lines.append(
        f"{outcome['backend']} on {outcome['target']}{how}, latent models: {outcome['passed']} passed, "
        f"{failed} failed{left} in {outcome['seconds']:.0f} s; worst errors: {worst or 'none'}"
    )
    return "\n".join(lines)
