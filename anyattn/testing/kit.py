"""The conformance kit: runs the items of a plan on one backend and gathers what happened."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from anyattn.testing.cases import Case
from anyattn.testing.checks import Skip, Subject, run_check
from anyattn.testing.explain import blamed
from anyattn.testing.plan import Item, KitPlan

__all__ = ["Result", "Summary", "reproduction", "run_item", "run_items", "summarise"]

_EXPLAINED = 12  # failures whose case is taken apart; the rest are named by their item alone


@dataclass(frozen=True)
class Result:
    """What happened to one item: passed, failed with reasons, or skipped with one."""

    item: Item
    error: float = 0.0
    why: str | None = None
    skipped: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Ran, and nothing was wrong."""
        return self.why is None and self.skipped is None


@dataclass
class Summary:
    """A run. `worst` maps (dtype, KV dtype, mode) to the largest error of a passing or failing case."""

    backend: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Result]:
        """Results that are neither passed nor skipped."""
        return [r for r in self.results if r.why is not None]

    @property
    def passed(self) -> int:
        """Number of items that ran and were right."""
        return sum(r.passed for r in self.results)

    @property
    def worst(self) -> dict[tuple[str, str, str], float]:
        """Largest error per (dtype, KV dtype, mode)."""
        found: dict[tuple[str, str, str], float] = {}
        for r in self.results:
            if r.skipped is None:
                key = (r.item.case.dtype, r.item.case.kv_dtype, r.item.case.mode)
                found[key] = max(found.get(key, 0.0), r.error)
        return dict(sorted(found.items()))


def run_item(item: Item, subject: Subject) -> Result:
    """Run one item; whatever it raises is a failure with a reason."""
    start = time.perf_counter()
    try:
        outcome = run_check(item.check, subject, item.case)
    except Skip as skip:
        return Result(item, skipped=str(skip), seconds=time.perf_counter() - start)
    except Exception as error:  # a crash is a failed item, and the run goes on
        return Result(item, why=_crash(error), seconds=time.perf_counter() - start)
    why = None if outcome.passed else outcome.why()
    return Result(item, outcome.error, why, seconds=time.perf_counter() - start)


def _crash(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{last.name}, {last.filename.rpartition('/')[2]}, line {last.lineno}" if last else "?"
    return f"{type(error).__name__} in {where}: {' '.join(str(error).split())[:400]}"


def run_items(
    items: Iterable[Item], subject: Subject, done: Callable[[Result], None] | None = None,
    *, explain: bool = True,
) -> list[Result]:  # fmt: skip
    """Run items in this process, in order. `done` is called after each.

    `explain`: the first failing cases are run again without one feature at a time, to name the culprit.
    """
    results, explained = [], 0
    for item in items:
        result = run_item(item, subject)
        if explain and result.why is not None and explained < _EXPLAINED:
            explained += 1
            result = explained_result(result, subject)
        results.append(result)
        if done is not None:
            done(result)
    return results


def explained_result(result: Result, subject: Subject) -> Result:
    """The result with the features named without which its case passes."""

    def passes(case: Case) -> bool:
        return run_item(Item(result.item.check, case, result.item.name), subject).passed

    if subject.declared.refusal(result.item.case) is not None:
        return result
    names = blamed(result.item.case, passes, subject.declared.refusal)
    if not names:
        return result
    why = f"{result.why}; passes without {' or '.join(names)}"
    return Result(result.item, result.error, why, None, result.seconds)


def reproduction(result: Result, backend: str, device: str) -> str:
    """A shell line that runs the failing item again."""
    check = "" if result.item.check == "numbers" else f" --check {result.item.check}"
    return f'anyattn verify {backend} --device {device}{check} --case "{result.item.case!r}"'


def summarise(backend: str, plan: KitPlan, results: Sequence[Result], seconds: float) -> Summary:
    """Results of the items that ran, and of those that the plan left out."""
    left_out = [Result(item, skipped=why) for item, why in plan.skipped]
    return Summary(backend, [*results, *left_out], seconds)
