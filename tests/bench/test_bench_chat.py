"""The day of chats: real quantiles, a scheduler that keeps its bounds, strata that add up."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from anyattn.bench.chat import Chat, StepShape, chat_lengths, contexts, day, representatives, turns
from anyattn.errors import ConfigError

SMALL = Chat(rate=3.0, max_batch=16, chunk=256, window=2.0)


def test_quantiles_are_ascending_and_reproduced() -> None:
    lengths = chat_lengths()
    for name in ("first_prompt", "later_prompt", "cached", "answer"):
        assert len(lengths[name]) == len(lengths["probabilities"])
        assert lengths[name] == sorted(lengths[name])
    drawn = list(itertools.islice(turns(random.Random(1), 8192), 4000))
    median = lengths["answer"][lengths["probabilities"].index(0.5)]
    assert statistics.median(t.answer for t in drawn) == pytest.approx(median, rel=0.1)
    first = sum(t.cached == 0 for t in drawn) / len(drawn)
    assert first == pytest.approx(lengths["conversations"] / lengths["turns"], abs=0.03)
    assert all(t.cached + t.prompt + t.answer <= 8192 for t in drawn)


def test_steps_keep_the_scheduler_s_bounds() -> None:
    steps = day(SMALL)
    assert day(SMALL) == steps, "the same seed, the same day"
    assert {step.kind for step in steps} == {"decode", "extend"}
    for step in steps:
        assert 1 <= len(step.pairs) <= SMALL.max_batch
        if step.kind == "extend":
            assert sum(new for _, new in step.pairs) <= SMALL.chunk
        else:
            assert {new for _, new in step.pairs} == {1}
        assert all(cached + new <= SMALL.max_context for cached, new in step.pairs)


def test_a_request_grows_by_a_token_a_step() -> None:
    steps = [step for step in day(SMALL) if step.kind == "decode"]
    grown = sum({p + 1 for p, _ in a.pairs} >= {p for p, _ in b.pairs} for a, b in itertools.pairwise(steps))
    assert grown > len(steps) // 2, "most decode steps follow one another"


def test_busy_hours_have_more_requests() -> None:
    assert SMALL.hourly_rate(16) == pytest.approx(SMALL.rate * 1.8)
    assert SMALL.hourly_rate(4) == pytest.approx(SMALL.rate * 0.2)
    assert statistics.mean(map(SMALL.hourly_rate, range(24))) == pytest.approx(SMALL.rate)


def test_representatives_stand_for_all() -> None:
    steps = [StepShape("decode", ((n, 1),), 2.0) for n in range(100)]
    found = representatives(steps, "decode", 4)
    assert [step.pairs[0][0] for step in found] == [12, 37, 62, 87]
    assert sum(step.count for step in found) == 200.0
    assert len(representatives(steps[:2], "decode", 4)) == 2
    assert representatives(steps, "extend", 4) == []


def test_contexts_are_reproducible() -> None:
    assert contexts(20, seed=3) == contexts(20, seed=3) != contexts(20, seed=4)
    assert all(1 <= n <= 8192 for n in contexts(200, seed=0))


def test_a_day_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="rate > 0"):
        Chat(rate=0)
