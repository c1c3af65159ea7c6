"""Write the parts of the documentation that come from data: `make docs` (or `python docs/update.py`).

README.md: the support table (from the catalog) and a decision (from a selection); they stand between marker
comments. docs/environment.md: the whole page (from `anyattn.env`). A test fails when any of them is stale.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import anyattn
from anyattn.catalog import records
from anyattn.core.capabilities import BackendRecord, ModelKind, Proof
from anyattn.env import VARIABLES

__all__ = ["decision_text", "environment_page", "main", "stale", "support_table", "updated_readme"]

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ENVIRONMENT = ROOT / "docs" / "environment.md"
PLATFORMS = {"cuda": "NVIDIA", "rocm": "AMD", "ascend": "Ascend", "cpu": "CPU"}
EXAMPLE_HOST = "cuda:sm90"

WORDS = {
    Proof.HARDWARE: "run on the chip",
    Proof.CPU: "run on a CPU",
    Proof.INTERPRETER: "Triton's interpreter only",
    Proof.EMULATED: "emulator only",
    Proof.CROSS_COMPILED: "compiled for the chip, not run",
    Proof.UNTESTED: "written, not tested",
}
"""How a row was proven, strongest first."""


def _chips(record: BackendRecord, kind: ModelKind, platform: str) -> dict[str, Proof]:
    """Each chip of a platform that the record serves, with the best proof among its rows."""
    order = list(WORDS)
    best: dict[str, Proof] = {}
    for row in (row for row in record.rows if kind in row.kinds):
        for owner, _, chip in (target.partition(":") for target in row.architectures):
            if owner == platform and chip != "*":
                best[chip] = min(best.get(chip, row.proof), row.proof, key=order.index)
    return best


def _cell(record: BackendRecord, kind: ModelKind, platform: str) -> str:
    """Chips of a platform, grouped by how they were proven."""
    groups: dict[Proof, list[str]] = {}
    for chip, proof in _chips(record, kind, platform).items():
        groups.setdefault(proof, []).append(chip)
    return "; ".join(
        f"{', '.join(sorted(groups[proof], key=_natural))}: {WORDS[proof]}"
        for proof in WORDS
        if proof in groups
    )


def _natural(chip: str) -> tuple[int, str]:
    return len(chip), chip


def _built(record: BackendRecord) -> list[str]:
    """Table lines of a record's adapters: one for each model kind and platform."""
    lines = []
    for kind in sorted(record.targets, key=lambda kind: kind.value):
        for platform, name in PLATFORMS.items():
            cell = _cell(record, kind, platform)
            if cell:
                lines.append(f"| `{record.name}` | {kind.value} | {name} | {cell} |")
    return lines


def _planned(record: BackendRecord) -> str:
    kinds = sorted({k.value for row in record.rows for k in row.kinds if k not in record.targets})
    platforms = [
        name
        for key, name in PLATFORMS.items()
        if any(_chips(record, kind, key) for kind in record.row_kinds() - set(record.targets))
    ]
    return f"| `{record.name}` | {', '.join(kinds)} | {', '.join(platforms)} |"


def support_table() -> str:
    """What has an adapter and how that was proven; then what is data only."""
    built = [line for record in records() for line in _built(record)]
    planned = [_planned(record) for record in records() if record.row_kinds() - set(record.targets)]
    return "\n".join(
        [
            "Backends that run in this version, and how each chip was proven:",
            "",
            "| Backend | Models | Platform | Proof |",
            "| --- | --- | --- | --- |",
            *built,
            "",
            "Not built yet: selection knows what these could do (that is data), and nothing runs them.",
            "",
            "| Backend | Models | Platform |",
            "| --- | --- | --- |",
            *planned,
        ]
    )


def decision_text() -> str:
    """A decision for a host that isn't there."""
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    text = str(anyattn.select(spec, dtype="bfloat16", host=EXAMPLE_HOST))
    return f"```text\n$ anyattn select --assume {EXAMPLE_HOST}\n{text}\n```"


def environment_page() -> str:
    """All `ANYATTN_*` variables."""
    lines = []
    for variable in VARIABLES.values():
        values = ", ".join(f"`{value}`" for value in variable.values or ())
        default = f"`{variable.default}`" if variable.default else "unset"
        lines.append(f"| `{variable.name}` | {variable.meaning} | {values or 'text'} | {default} |")
    return "\n".join(
        [
            "# Environment variables",
            "",
            "<!-- Written by `make docs` from anyattn/env.py. -->",
            "",
            "An empty variable counts as unset. Arguments go before variables, variables before pinned",
            "files. A variable that begins with `ANYATTN_` and isn't in this table is an error, and so is a",
            "value that can't be: a misspelt choice never passes for none.",
            "",
            "| Variable | Meaning | Values | Default |",
            "| --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )


def updated_readme(text: str) -> str:
    """`text` with its generated parts brought up to date.

    Raises:
        ValueError: a marker is missing.
    """
    for name, body in (("support", support_table()), ("decision", decision_text())):
        pattern = re.compile(rf"(<!-- begin {name}\b[^>]*-->\n).*?(\n<!-- end {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, body=body: f"{match[1]}{body}{match[2]}", text)
        if count != 1:
            raise ValueError(f"README.md has {count} sections named {name}, not 1")
    return text


def stale() -> dict[Path, str]:
    """Files whose generated parts are out of date, with what they should hold."""
    wanted = {README: updated_readme(README.read_text(encoding="utf-8")), ENVIRONMENT: environment_page()}
    return {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Write what is stale."""
    for path, text in stale().items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
