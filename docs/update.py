"""Write the parts of the documentation that come from data: `make docs` (or `python docs/update.py`).

README.md: the support table (from recorded results, as docs/support.md is) and a decision (from a selection);
they stand between marker comments. docs/environment.md: the whole page (from `anyattn.env`). A test fails
when any of them is stale.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import anyattn
from anyattn.catalog import records
from anyattn.cli.matrix_results import load_results
from anyattn.cli.matrix_support import Cell, cells_of
from anyattn.core.capabilities import BackendRecord, ModelKind
from anyattn.env import VARIABLES

__all__ = ["decision_text", "environment_page", "main", "stale", "support_table", "updated_readme"]

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ENVIRONMENT = ROOT / "docs" / "environment.md"
PLATFORMS = {"cuda": "NVIDIA", "rocm": "AMD", "ascend": "Ascend", "cpu": "CPU"}
EXAMPLE_HOST = "cuda:sm90"

WORDS = {
    "passing": "run on the chip",
    "failing": "failing",
    "emulated": "on a stand-in or in Triton's interpreter only",
    "cross-compiled": "compiled for the chip, not run",
    "untested": "written, not tested",
}
"""What the statuses of docs/support.md are called, strongest first."""


@functools.cache
def _cells() -> tuple[Cell, ...]:
    """What docs/support.md is written from: the recorded results, and nothing that a row claims."""
    return cells_of(records(), load_results(ROOT / "ci" / "results"))


def _cell(record: BackendRecord, kind: ModelKind, platform: str) -> str:
    """Chips of a platform, grouped by how they were proven; a failure with its numbers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in _cells():
        if cell.key[:3] == (record.name, kind.value, platform):
            told = f" ({cell.evidence.replace('; ', ', ')})" if cell.status == "failing" else ""
            groups.setdefault((cell.status, told), []).append(cell.architecture)
    order = list(WORDS)
    return "; ".join(
        f"{', '.join(sorted(chips, key=_natural))}: {WORDS[status]}{told}"
        for (status, told), chips in sorted(groups.items(), key=lambda group: order.index(group[0][0]))
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
        if any(_named(record, kind, key) for kind in record.row_kinds() - set(record.targets))
    ]
    return f"| `{record.name}` | {', '.join(kinds)} | {', '.join(platforms)} |"


def _named(record: BackendRecord, kind: ModelKind, platform: str) -> bool:
    """A row of the kind names a chip of the platform."""
    named = {chip for row in record.rows if kind in row.kinds for chip in row.architectures}
    return any(chip.startswith(f"{platform}:") and not chip.endswith("*") for chip in named)


def support_table() -> str:
    """What has an adapter and how that was proven; then what is data only."""
    built = [line for record in records() for line in _built(record)]
    planned = [_planned(record) for record in records() if record.row_kinds() - set(record.targets)]
    return "\n".join(
        [
            "Backends that run in this version, and what was recorded of each chip",
            "([with dates, versions and failures](docs/support.md)):",
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
