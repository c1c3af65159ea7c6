"""Covering arrays: every feasible pair stands in a row, no row breaks a rule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from anyattn.errors import ConfigError
from anyattn.testing.pairwise import covering_rows, pairs_of, random_row

AXES: dict[str, list[Any]] = {
    "a": [0, 1, 2, 3],
    "b": ["x", "y", "z"],
    "c": [None, 5],
    "d": [False, True],
    "e": [(1, 1), (2, 1), (4, 2)],
}


def rules(row: Mapping[str, Any]) -> bool:
    """c needs b = x or y; a = 3 goes with d alone."""
    if row.get("c") == 5 and row.get("b", "x") == "z":
        return False
    return not (row.get("a") == 3 and row.get("d", True) is False)


@pytest.mark.parametrize("seed", range(4))
def test_every_feasible_pair_is_covered(seed: int) -> None:
    rows, coverage = covering_rows(AXES, rules, seed)
    assert all(rules(row) for row in rows)
    covered = set().union(*(pairs_of(AXES, row) for row in rows))
    whole = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    possible = set().union(*(pairs_of(AXES, row) for row in whole if rules(row)))
    assert covered == possible
    assert (coverage.covered, coverage.possible) == (len(possible), len(possible))
    assert len(rows) <= 20 < len(whole)


def test_the_same_seed_gives_the_same_rows() -> None:
    assert covering_rows(AXES, rules, 7)[0] == covering_rows(AXES, rules, 7)[0]
    assert covering_rows(AXES, rules, 7)[0] != covering_rows(AXES, rules, 8)[0]


def test_a_limit_leaves_pairs_uncovered_and_says_so() -> None:
    rows, coverage = covering_rows(AXES, rules, 0, limit=3)
    assert len(rows) == 3
    assert 0 < coverage.covered < coverage.possible
    assert "%" in str(coverage)


def test_a_pair_that_only_fails_later_is_not_possible() -> None:
    """Each two of the three values go together by the rule, all three never: the pair has no whole row."""
    axes = {"a": [0, 1], "b": [0, 1], "c": [0]}
    rows, coverage = covering_rows(axes, lambda r: not (len(r) == 3 and r["a"] == r["b"] == 1), 0)
    assert {(r["a"], r["b"]) for r in rows} == {(0, 0), (0, 1), (1, 0)}
    assert coverage.covered == coverage.possible == 7


@pytest.mark.parametrize("values", [[], [1, 1]])
def test_bad_axes_are_refused(values: list[int]) -> None:
    with pytest.raises(ConfigError, match="axis a"):
        covering_rows({"a": values, "b": [0]}, rules, 0)


def test_no_row_at_all() -> None:
    import random

    with pytest.raises(ConfigError, match="no row"):
        random_row(AXES, lambda row: len(row) < 5, random.Random(0))


def test_a_row_that_few_orders_find() -> None:
    """One row of 128 is allowed, which is seen when a row is whole."""
    import random

    axes: dict[str, list[Any]] = {f"axis {i}": [0, 1] for i in range(7)}
    for seed in range(5):
        row = random_row(axes, lambda r: len(r) < 7 or not any(r.values()), random.Random(seed))
        assert set(row.values()) == {0}
