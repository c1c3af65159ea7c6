"""What one run of the kit does: pinned edges, pairwise cases and checks, as a list of items."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.testing.axes import FULL, QUICK, Sizes, axes_of, case_of, feasible_for
from anyattn.testing.cases import SLOT_LAYOUTS, Case
from anyattn.testing.checks import CHECKS
from anyattn.testing.declared import Declared
from anyattn.testing.giants import giant_cases
from anyattn.testing.pairwise import Coverage, Row, covering_rows, pairs_of, random_row
from anyattn.testing.pins import check_cases, pinned, shape_of

__all__ = ["Item", "KitPlan", "pinned_items", "plan_kit", "plan_random"]

_BOTH = (False, True)
_BIG_CHECKS = frozenset({"offsets-past-2-31"})
"""Left out of a quick run: they need gigabytes."""


@dataclass(frozen=True)
class Item:
    """One check of one case; `name` says what it looks for."""

    check: str
    case: Case
    name: str

    def label(self) -> str:
        """How reports name it."""
        return self.name if self.check == "numbers" else f"{self.check}: {self.name}"


@dataclass(frozen=True)
class KitPlan:
    """Items to run, what was left out and why, and the pairs that the pairwise cases cover."""

    items: tuple[Item, ...]
    skipped: tuple[tuple[Item, str], ...]
    coverage: Coverage
    axes: dict[str, int]


def _describe(case: Case) -> str:
    parts = [case.mode, *([case.kind] if case.kind != "causal" else [])]
    parts += [f"window {case.window}"] * (case.window is not None)
    parts += [name for name in ("sinks", "strided") if getattr(case, name)]
    return " ".join([*parts, *([f"{case.mask} mask"] if case.mask else [])])


def pinned_items(declared: Declared, sizes: Sizes = QUICK) -> list[Item]:
    """Pinned cases and all checks, on the smallest shapes that the backend declares."""
    axes = axes_of(declared, sizes)
    shape = shape_of(declared, axes)
    long = 300 if sizes is QUICK else 2000
    pins = [Item("numbers", case, name) for name, case in pinned(shape, long)]
    checks = [Item(check, case, _describe(case)) for check, case in check_cases(shape, declared)]
    return [*pins, *checks]


def plan_kit(declared: Declared, *, seed: int = 0, full: bool = False, count: int | None = None) -> KitPlan:
    """The items of a run.

    Args:
        full: larger shapes, every pairwise row several times with other lengths and data, and more seeds.
        count: numbers cases at most in a full run (default 4000); rows are repeated until it is reached.
    """
    sizes = FULL if full else QUICK
    axes = axes_of(declared, sizes)
    rows, coverage = covering_rows(axes, feasible_for(declared, axes), seed)
    cases = [case_of(row, seed, sizes.max_context) for row in rows]
    if full:
        cases += _variations(rows, seed, sizes, (count or 4000) - len(cases))
    pairwise = [Item("numbers", case, f"pairwise, {_describe(case)}") for case in cases]
    wanted = [*pinned_items(declared, sizes), *pairwise]
    if full:
        wanted += [*pinned_items(declared, QUICK), *_giant_items(declared, axes)]
    items, skipped = [], []
    for item in dict.fromkeys(wanted):
        why = _left_out(declared, item, full=full)
        if why is None:
            items.append(item)
        else:
            skipped.append((item, why))
    counts = {name: len(values) for name, values in axes.items()}
    return KitPlan(tuple(items), tuple(skipped), coverage, counts)


def _giant_items(declared: Declared, axes: dict[str, list[Any]]) -> list[Item]:
    """Many requests and long contexts: an accelerator's work."""
    if declared.facts.platform == "cpu" or declared.emulated:
        return []
    shape = shape_of(declared, axes)
    return [Item("numbers", case, f"{name}, {_describe(case)}") for name, case in giant_cases(shape, axes)]


def plan_random(declared: Declared, count: int, *, seed: int = 0, full: bool = False) -> KitPlan:
    """`count` rows drawn at random from the same axes, in place of pins, checks and pairwise rows."""
    sizes = FULL if full else QUICK
    axes = axes_of(declared, sizes)
    feasible = feasible_for(declared, axes)
    rng = random.Random(f"random/{seed}")
    items, covered = [], set()
    for index in range(count):
        row = random_row(axes, feasible, rng)
        covered |= pairs_of(axes, row)
        case = case_of(row, f"random/{seed}/{index}", sizes.max_context)
        items.append(Item("numbers", case, f"random, {_describe(case)}"))
    possible = covering_rows(axes, feasible, seed)[1].possible
    counts = {name: len(values) for name, values in axes.items()}
    return KitPlan(tuple(items), (), Coverage(len(covered), possible), counts)


def _left_out(declared: Declared, item: Item, *, full: bool) -> str | None:
    assert item.check in CHECKS
    if item.check in _BIG_CHECKS and not full:
        return "needs gigabytes of memory: in --full"
    return declared.refusal(item.case)


def _variations(rows: list[Row], seed: int, sizes: Sizes, count: int) -> list[Case]:
    """More cases of the same compiled kernels: other lengths, slots and data."""
    cases: list[Case] = []
    turn = 0
    while len(cases) < count:
        turn += 1
        for index, row in enumerate(rows[: count - len(cases)]):
            cases.append(_variation(row, f"{seed}/{turn}/{index}", sizes))
    return cases


def _variation(row: Row, seed: str, sizes: Sizes) -> Case:
    """`case_of` again with another seed: lengths, scales and data differ, what is compiled doesn't."""
    rng = random.Random(seed)
    loose: dict[str, Sequence[Any]] = {
        "slots": SLOT_LAYOUTS, "strided": _BOTH, "flat": _BOTH, "out": _BOTH, "host": ("lists", "device"),
        "batch": sizes.batches,
    }  # fmt: skip
    drawn = {name: rng.choice(values) for name, values in loose.items()}
    return case_of({**row, **drawn}, seed, sizes.max_context)
