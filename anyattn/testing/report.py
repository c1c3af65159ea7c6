"""What a run of the kit prints: text, the JSON document, and the table of errors in `docs/errors.md`."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from anyattn.core.capabilities import CapabilityRow
from anyattn.testing.declared import Declared
from anyattn.testing.kit import Summary, reproduction
from anyattn.testing.plan import KitPlan

__all__ = ["document", "host_of", "merge_table", "text", "versions_of"]

_SHOWN = 20

_HEAD = """# Worst error of each backend

Largest error, max |difference| / max |reference| per request, against attention in float64 on the same
inputs; for each backend, dtype of the model, dtype of the KV and mode. Written by
`anyattn verify BACKEND --write docs/errors.md`, one section for each backend and kind of host; nothing here
is typed by hand. Allowed: 1e-5 (float32), 3e-3 (float16), 2e-2 (bfloat16).
"""


def versions_of(rows: Iterable[CapabilityRow]) -> dict[str, str]:
    """Python's, torch's, Triton's, this package's, and those of the libraries that the rows may run on."""
    asked = (p.distribution for row in rows for p in (*row.providers, *row.requires))
    versions = {"python": platform.python_version()}
    for name in dict.fromkeys(("torch", "triton", "anyattn", *asked)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def host_of(declared: Declared, device: str) -> dict[str, Any]:
    """The machine and versions that a result is for."""
    versions = versions_of(declared.rows)
    kernels = "emulated" if declared.emulated else "interpreted" if declared.interpreted else "native"
    return {
        "target": declared.facts.target,
        "device": device,
        "name": declared.facts.device_name,
        "kernels": kernels,
        "versions": versions,
    }


def document(summary: Summary, plan: KitPlan, host: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The JSON document; `passed + failed + skipped = cases`."""
    where = _where(host)
    return {
        "backend": summary.backend,
        **({"emulated": True} if host["kernels"] == "emulated" else {}),
        "host": dict(host),
        "cases": len(summary.results),
        "passed": summary.passed,
        "failed": [
            {
                "name": r.item.label(),
                "check": r.item.check,
                "case": repr(r.item.case),
                "why": r.why,
                "reproduce": reproduction(r, summary.backend, where),
            }
            for r in summary.failed
        ],
        "skipped": [
            {"case": f"{r.item.label()}: {r.item.case!r}", "why": r.skipped}
            for r in summary.results
            if r.skipped is not None
        ],
        "coverage": {
            "pairs_covered": plan.coverage.covered,
            "pairs_possible": plan.coverage.possible,
            "axes": plan.axes,
            "seed": seed,
        },
        "worst_error": {"/".join(key): error for key, error in summary.worst.items()},
        "seconds": round(summary.seconds, 1),
    }


def text(summary: Summary, plan: KitPlan, host: Mapping[str, Any]) -> str:
    """A page for people: failures first, each with the line that runs it again."""
    where, lines = _where(host), []
    for r in summary.failed[:_SHOWN]:
        lines += [f"FAILED {r.item.label()}", f"  {r.why}"]
        lines += [f"  {reproduction(r, summary.backend, where)}"]
    if len(summary.failed) > _SHOWN:
        lines.append(f"... and {len(summary.failed) - _SHOWN} more: --json lists them all")
    skipped = [r for r in summary.results if r.skipped is not None]
    for why, count in _counted(str(r.skipped) for r in skipped).items():
        lines.append(f"skipped {count}: {why}")
    how = {"interpreted": " in Triton's interpreter", "emulated": ", EMULATED"}.get(host["kernels"], "")
    worst = max(summary.worst.values(), default=0.0)
    lines += [
        f"{summary.backend} on {host['target']}{how}: {summary.passed} passed, {len(summary.failed)} failed, "
        f"{len(skipped)} skipped in {summary.seconds:.0f} s; pairwise: {plan.coverage}; "
        f"worst error {worst:.2g}"
    ]
    return "\n".join(lines)


def _where(host: Mapping[str, Any]) -> str:
    """Options that put a case back where it ran."""
    emulated = f" --emulated --assume {host['target']}" if host["kernels"] == "emulated" else ""
    return f"{host['device']}{emulated}"


def _counted(reasons: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for why in reasons:
        counts[why] = counts.get(why, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def merge_table(old: str, summary: Summary, host: Mapping[str, Any]) -> str:
    """The table with this run's section in the place of an older one for the same backend and host."""
    kernels = {"interpreted": ", Triton's interpreter", "emulated": ", emulated"}.get(host["kernels"], "")
    target = "cpu" if host["device"] == "cpu" and host["kernels"] != "emulated" else host["target"]
    title = f"## {summary.backend} on {target}{kernels}"
    sections = dict.fromkeys(re.findall(r"^## .*$", old, flags=re.MULTILINE))
    bodies = {name: _body(old, name) for name in sections}
    bodies[title] = _section(summary, host)
    return _HEAD + "".join(f"\n{name}\n{bodies[name]}" for name in sorted(bodies))


def _body(old: str, title: str) -> str:
    after = old.split(f"{title}\n", 1)[1]
    return re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0].rstrip("\n") + "\n"


def _section(summary: Summary, host: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {version}" for name, version in host["versions"].items() if name != "python"
    )
    modes = sorted({mode for _, _, mode in summary.worst})
    lines = [
        "",
        f"{summary.passed} passed, {len(summary.failed)} failed; {versions}.",
        "",
        f"| model | KV | {' | '.join(modes)} |",
        f"|---|---|{'---|' * len(modes)}",
    ]
    for dtype, kv in dict.fromkeys((d, kv) for d, kv, _ in summary.worst):
        cells = (summary.worst.get((dtype, kv, mode)) for mode in modes)
        lines.append(f"| {dtype} | {kv} | {' | '.join('' if c is None else f'{c:.1e}' for c in cells)} |")
    return "\n".join(lines) + "\n"
