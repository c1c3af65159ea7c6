"""Prompt look-up: what it drafts, and that it never drafts more than it may."""

import random

import pytest

from anyattn.demo.ngram import NgramDrafter
from anyattn.errors import ConfigError


def test_what_followed_before_is_drafted() -> None:
    made = NgramDrafter().draft([1, 2, 3, 4, 5, 9, 1, 2, 3], max_nodes=8, max_depth=10)
    assert made.tokens == [3, 4, 5, 9, 1, 2, 3]
    assert made.tree.is_chain


def test_continuations_that_differ_are_branches_latest_first() -> None:
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2, 7, 9, 1, 2]
    made = NgramDrafter(longest=2, branches=3).draft(text, max_nodes=12, max_depth=2)
    assert list(made.paths()) == [[7, 9], [8, 8], [7, 7]]
    assert made.tokens == [2, 7, 9, 8, 8, 7]


def test_longer_matches_come_first() -> None:
    text = [5, 1, 2, 3, 6, 2, 3, 7, 5, 1, 2, 3]
    made = NgramDrafter(longest=3, shortest=1, branches=1).draft(text, max_nodes=3, max_depth=1)
    assert made.tokens == [3, 6]


def test_nothing_known_gives_the_root_alone() -> None:
    for text in ([1], [1, 2, 3, 4]):
        assert NgramDrafter().draft(text, max_nodes=8, max_depth=5).tokens == text[-1:]
    repeated = [1, 2, 1, 2, 1, 2]
    assert NgramDrafter().draft(repeated, max_nodes=1, max_depth=5).tokens == [2]
    assert NgramDrafter().draft(repeated, max_nodes=8, max_depth=0).tokens == [2]


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_and_every_path_was_seen_before(seed: int) -> None:
    rng = random.Random(seed)
    text = [rng.randrange(4) for _ in range(60)]
    nodes, depth = rng.randint(1, 12), rng.randint(1, 9)
    made = NgramDrafter(shortest=1).draft(text, max_nodes=nodes, max_depth=depth)
    assert len(made.tokens) <= nodes
    assert max(made.tree.depths) <= depth
    joined = " ".join(map(str, text))
    for path in made.paths():
        assert " ".join(map(str, [text[-1], *path])) in joined


def test_drafters_that_cannot_be() -> None:
    for options in ({"shortest": 0}, {"shortest": 5}, {"branches": 0}):
        with pytest.raises(ConfigError, match="an n-gram drafter"):
            NgramDrafter(**options)
