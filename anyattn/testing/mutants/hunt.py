"""Does the kit notice? Each mutant is applied, and pins, checks and pairwise cases run until one fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anyattn.errors import UnknownNameError
from anyattn.testing.checks import Subject
from anyattn.testing.kit import explained_result, run_item
from anyattn.testing.mutants import MUTANTS
from anyattn.testing.mutants.patching import Mutant, MutantError, applied
from anyattn.testing.plan import Item, plan_kit
from anyattn.testing.subject import open_subject

__all__ = ["Caught", "hunt", "hunt_one", "hunt_text"]


@dataclass(frozen=True)
class Caught:
    """A mutant and the first failure that names it (`by`, `why`); empty where it survived.

    `unnamed`: failures before that one, which noticed without naming the fault.
    """

    name: str
    report: str
    by: str = ""
    why: str = ""
    unnamed: int = 0

    @property
    def caught(self) -> bool:
        """A failing item named the fault."""
        return bool(self.by)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "caught": self.caught}


def hunt(subject: Subject, mutants: Sequence[Mutant] | None = None) -> list[Caught]:
    """Every mutant of the backend (or those given) against the items of a quick run.

    Mutants of other chips come last; they need stand-ins, and on a device they are left out.

    Raises:
        UnknownNameError: the backend has no mutants.
    """
    name = subject.declared.name
    if mutants is None and name not in MUTANTS:
        raise UnknownNameError("backend with mutants", name, MUTANTS)
    chosen = mutants or MUTANTS[name]
    found = _hunted_all([m for m in chosen if not m.host], subject)
    for host in sorted({m.host for m in chosen if m.host} if subject.host else ()):
        elsewhere = open_subject(name, subject.device, emulated=True, host=host)
        found += _hunted_all([m for m in chosen if m.host == host], elsewhere)
    return found


def _hunted_all(mutants: Sequence[Mutant], subject: Subject) -> list[Caught]:
    items = plan_kit(subject.declared).items if mutants else ()
    return [_hunted(mutant, items, subject) for mutant in mutants]


def _hunted(mutant: Mutant, items: Sequence[Item], subject: Subject) -> Caught:
    try:
        return hunt_one(mutant, items, subject)
    except MutantError as error:
        return Caught(mutant.name, mutant.report, why=" ".join(str(error).split()))


def hunt_one(mutant: Mutant, items: Iterable[Item], subject: Subject) -> Caught:
    """One mutant: items that name its fault first, then all others. Raises `MutantError`."""
    ordered = sorted(items, key=lambda item: not _named(mutant, item.label()))
    unnamed = 0
    with applied(mutant), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for item in ordered:
            result = run_item(item, subject)
            if result.why is None:
                continue
            if not _named(mutant, f"{item.label()}: {result.why}") and unnamed < 6:
                result = explained_result(result, subject)
            if _named(mutant, f"{item.label()}: {result.why}"):
                return Caught(mutant.name, mutant.report, item.label(), str(result.why), unnamed)
            unnamed += 1
            if unnamed > 6:
                break
    return Caught(mutant.name, mutant.report, unnamed=unnamed)


def _named(mutant: Mutant, text: str) -> bool:
    return any(word in text for word in mutant.names)


def hunt_text(found: Sequence[Caught]) -> str:
    """A line for each mutant, survivors last."""
    lines = []
    for caught in sorted(found, key=lambda c: not c.caught):
        report = f" ({caught.report})" if caught.report else ""
        verdict = f"caught by {caught.by}: {caught.why}" if caught.caught else "SURVIVED"
        if not caught.caught and caught.unnamed:
            verdict = f"NOT NAMED, though {caught.unnamed} items failed"
        if not caught.caught and caught.why:
            verdict = f"NOT APPLIED: {caught.why}"
        lines.append(f"{caught.name}{report}: {verdict}")
    number = sum(caught.caught for caught in found)
    return "\n".join([*lines, f"{number} of {len(found)} mutants caught"])
