"""What is proven where, from results: one cell for each backend, kind of model and chip that a row names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from anyattn.cli.matrix_results import Result
from anyattn.core.capabilities import BackendRecord, ModelKind

__all__ = ["STATUSES", "Cell", "cells_of", "lost_cells", "read_csv", "support_page", "to_csv"]

STATUSES = ("failing", "untested", "cross-compiled", "emulated", "passing")
"""Weakest first. Passing and failing ran on the chip, or failed wherever they ran."""

_PLATFORMS = {"cuda": "NVIDIA", "rocm": "AMD", "ascend": "Ascend", "cpu": "CPU"}
_STRENGTH = {"native": 4, "emulated": 3, "compiled": 2, "interpreted": 1}
"""Which evidence a cell is named after. The interpreter says nothing of a chip, so it comes last."""
_WORDS = {
    "native": "ran on it",
    "emulated": "on a stand-in for its library",
    "compiled": "compiled for it",
    "interpreted": "in Triton's interpreter",
}


@dataclass(frozen=True)
class Cell:
    """One backend on one chip."""

    backend: str
    models: str
    platform: str
    architecture: str
    status: str = "untested"
    evidence: str = ""
    date: str = ""
    commit: str = ""
    versions: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies it."""
        return self.backend, self.models, self.platform, self.architecture

    @property
    def rank(self) -> int:
        """Strength of its status."""
        return STATUSES.index(self.status)


def cells_of(records: Iterable[BackendRecord], results: Sequence[Result]) -> tuple[Cell, ...]:
    """A cell for every chip that an adapter's rows name, with the strongest of the latest evidence."""
    cells = []
    for record in records:
        for kind in sorted(record.targets, key=lambda kind: kind.value):
            for target in _chips(record, kind):
                platform, _, architecture = target.partition(":")
                bare = Cell(record.name, kind.value, platform, architecture)
                cells.append(_judged(bare, _evidence(bare, target, results)))
    return tuple(cells)


def _chips(record: BackendRecord, kind: ModelKind) -> tuple[str, ...]:
    named = {a for row in record.rows if kind in row.kinds for a in row.architectures if not a.endswith("*")}
    order = list(_PLATFORMS)
    return tuple(sorted(named, key=lambda a: (order.index(a.partition(":")[0]), len(a), a)))


def _evidence(cell: Cell, target: str, results: Sequence[Result]) -> dict[str, Result]:
    """The latest result of each way; the interpreter's counts for every chip."""
    latest: dict[str, Result] = {}
    for result in results:  # oldest first
        if (result.backend, result.models) != (cell.backend, cell.models):
            continue
        if target in result.cells or (result.how == "interpreted" and cell.platform != "cpu"):
            latest[result.how] = result
    return dict(sorted(latest.items(), key=lambda item: -_STRENGTH[item[0]]))


def _counts(result: Result, target: str) -> tuple[int, int]:
    return result.cells[target] if target in result.cells else next(iter(result.cells.values()))


def _judged(cell: Cell, evidence: Mapping[str, Result]) -> Cell:
    if not evidence:
        return cell
    target = f"{cell.platform}:{cell.architecture}"
    counts = {how: _counts(result, target) for how, result in evidence.items()}
    bad = [how for how, (_, failed) in counts.items() if failed]
    how = bad[0] if bad else next(iter(evidence))
    words = {"native": "passing", "compiled": "cross-compiled"}
    status = "failing" if bad else words.get(how, "emulated")
    told = [f"{_WORDS[h]}: {passed} of {passed + failed}" for h, (passed, failed) in counts.items()]
    result = evidence[how]
    return Cell(*cell.key, status, "; ".join(told), result.date, result.commit, result.ran_on, result.note)


def to_csv(cells: Iterable[Cell]) -> str:
    """The cells as a table."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [f.name for f in fields(Cell)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cell) for cell in cells)
    return out.getvalue()


def read_csv(text: str) -> tuple[Cell, ...]:
    """The cells that `to_csv` wrote."""
    return tuple(Cell(**row) for row in csv.DictReader(io.StringIO(text)))


def lost_cells(before: Iterable[Cell], after: Iterable[Cell]) -> tuple[tuple[str, str, str], ...]:
    """(cell, status before, status after) of all that got weaker or went away."""
    now = {cell.key: cell for cell in after}
    lost = []
    for cell in before:
        found = now.get(cell.key)
        if found is None or found.rank < cell.rank:
            name = f"{cell.backend} {cell.models} {cell.platform}:{cell.architecture}"
            lost.append((name, cell.status, found.status if found else "gone"))
    return tuple(lost)


def support_page(cells: Sequence[Cell]) -> str:
    """`docs/support.md`."""
    lines = [
        "# What is proven where",
        "",
        "<!-- Written by `anyattn matrix update` from ci/results and the catalog, nothing by hand. -->",
        "",
        "A cell for each backend, kind of model and chip that a capability row names, given an adapter.",
        "",
        "- **passing**: the conformance kit ran on that chip, without a failure.",
        "- **failing**: it failed, on the chip or on whatever stood in for it.",
        "- **emulated**: the calls ran against a stand-in for the library, or the kernels in Triton's",
        "  interpreter. The arithmetic and the arguments are checked, the chip's kernels are not.",
        "- **cross-compiled**: the kernels compile for the chip and stay within its memory. Not run.",
        "- **untested**: written, and nothing has been recorded.",
        "",
        *_counted(cells),
    ]
    for platform, title in _PLATFORMS.items():
        own = [cell for cell in cells if cell.platform == platform]
        if own:
            lines += ["", f"## {title}", "", *_grid(own), "", *_proofs(own)]
    return "\n".join([*lines, ""])


def _counted(cells: Sequence[Cell]) -> list[str]:
    counts = {status: sum(cell.status == status for cell in cells) for status in reversed(STATUSES)}
    return [f"{len(cells)} cells: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + "."]


def _grid(cells: Sequence[Cell]) -> list[str]:
    """Backends down, chips across."""
    chips = sorted(dict.fromkeys(cell.architecture for cell in cells), key=lambda chip: (len(chip), chip))
    lines = [f"| backend | models | {' | '.join(chips)} |", f"| --- | --- |{' --- |' * len(chips)}"]
    for backend, models in dict.fromkeys((cell.backend, cell.models) for cell in cells):
        own = {c.architecture: c.status for c in cells if (c.backend, c.models) == (backend, models)}
        lines.append(f"| `{backend}` | {models} | {' | '.join(own.get(chip, '') for chip in chips)} |")
    return lines


def _proofs(cells: Sequence[Cell]) -> list[str]:
    """The evidence behind each cell that has some; what is the same for several chips once."""
    told: dict[tuple[str, ...], list[str]] = {}
    for cell in cells:
        if cell.evidence:
            key = (
                f"`{cell.backend}` {cell.models}",
                cell.evidence,
                cell.date,
                cell.commit,
                cell.versions,
                cell.note,
            )
            told.setdefault(key, []).append(cell.architecture)
    return [
        f"- {who}, {', '.join(chips)}: {evidence} ({date}, commit {commit}{versions and f'; {versions}'})"
        + (f". {note[0].upper()}{note[1:]}." if note else "")
        for (who, evidence, date, commit, versions, note), chips in told.items()
    ]
