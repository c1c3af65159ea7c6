"""Identities of capability rows, and the file that keeps them: a lost row needs a stated reason.

`rows.txt` has one line a row. Whoever removes or weakens one runs `update_rows.py --reason "…"`, which moves
the old line to the REMOVED section with that reason, where a reviewer sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anyattn.core.capabilities import BackendRecord, CapabilityRow, Provider

__all__ = ["PATH", "Ledger", "identity", "problems", "read", "write"]

PATH = Path(__file__).parent / "rows.txt"
HEADER = "# One line for each capability row. Written by update_rows.py."
REMOVED = "# REMOVED: rows that were taken back, each with its reason below it."
REASON = "    because: "


@dataclass(frozen=True)
class Ledger:
    """Rows that stand, and rows that were removed with the reasons."""

    rows: tuple[str, ...]
    removed: dict[str, str]


def _needs(providers: tuple[Provider, ...], joiner: str) -> str:
    return joiner.join(f"{p.distribution}{p.versions}" for p in providers)


def identity(record: BackendRecord, row: CapabilityRow) -> str:
    """Everything that a row promises, in a line; how it was proven and where it was read isn't part of it."""
    libraries = " and ".join(filter(None, (_needs(row.providers, " or "), _needs(row.requires, " and "))))
    counts = [
        f"{name} {min(values)}..{max(values)} ({len(values)})"
        for name, values in (("q", row.q_heads), ("kv", row.kv_heads), ("group", row.group_sizes))
        if values
    ]
    form = row.form
    parts = (
        record.name,
        "+".join(k.value for k in row.kinds),
        "+".join(p.value for p in row.phases),
        " ".join(row.architectures),
        f"{'+'.join(row.dtypes)} on {'+'.join(row.kv_dtypes)}",
        f"D {row.head_dims}",
        ", ".join(counts),
        f"pages {row.pages} {'+'.join(row.layouts)}",
        f"{form.kind}/{form.kernel_page} slack {form.index_slack} width {form.width_multiple}",
        "+".join(f.value for f in row.features),
        f"det {row.determinism} host {row.host_lengths} graph {row.graph} nan {int(row.tolerates_nan_tail)}",
        f"runtime {row.runtime}" if row.runtime else "",
        libraries,
        row.method,
        f"slow: {row.degraded}" if row.degraded else "",
    )
    return " | ".join(part for part in parts if part)


def read(text: str) -> Ledger:
    """The ledger from the file's text."""
    standing, _, gone = text.partition(REMOVED)
    rows = tuple(line for line in standing.splitlines() if line and not line.startswith("#"))
    removed: dict[str, str] = {}
    last = ""
    for line in filter(None, gone.splitlines()):
        if line.startswith(REASON):
            removed[last] = line.removeprefix(REASON).strip()
        else:
            last = line
            removed[last] = ""
    return Ledger(rows, removed)


def write(ledger: Ledger) -> str:
    """The file's text from a ledger."""
    lines = [HEADER, "", *ledger.rows, "", REMOVED]
    for row, reason in ledger.removed.items():
        lines += ["", row, f"{REASON}{reason}"]
    return "\n".join(lines) + "\n"


def problems(now: tuple[str, ...], ledger: Ledger) -> list[str]:
    """What doesn't agree between the catalog and the ledger; empty if all does."""
    lost = [f"lost without a reason: {row}" for row in ledger.rows if row not in now]
    new = [f"not on file: {row}" for row in now if row not in ledger.rows]
    silent = [f"removed without a reason: {row}" for row, why in ledger.removed.items() if not why]
    back = [f"stands in the catalog again: {row}" for row in ledger.removed if row in now]
    return lost + new + silent + back
