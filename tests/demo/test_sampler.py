"""Greedy and nucleus sampling."""

from __future__ import annotations

import pytest
import torch

from anyattn.demo.sampler import SamplingParams, sample
from anyattn.errors import ConfigError


def draws(logits: list[float], count: int, **options: float) -> list[int]:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    generator = params.generator()
    row = torch.tensor([logits])
    return [sample(row, [params], [generator])[0] for _ in range(count)]


def test_greedy_takes_the_best_of_each_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    params = SamplingParams()
    assert sample(logits, [params] * 2, [params.generator()] * 2) == [1, 0]


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 7), [], []) == []


def test_frequencies_follow_the_softmax() -> None:
    found = draws([0.0, 1.0, 2.0], 6000, temperature=1.0, seed=4)
    expected = torch.tensor([0.0, 1.0, 2.0]).softmax(0)
    for token in range(3):
        assert abs(found.count(token) / 6000 - float(expected[token])) < 0.02


def test_temperature_sharpens() -> None:
    hot = draws([0.0, 1.0, 2.0], 2000, temperature=3.0, seed=1).count(2)
    cold = draws([0.0, 1.0, 2.0], 2000, temperature=0.3, seed=1).count(2)
    assert cold > hot + 500


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {2}), (0.7, {1, 2}), (1.0, {0, 1, 2})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    found = draws([0.0, 1.0, 2.0], 400, temperature=1.0, top_p=top_p)  # 0.09, 0.24, 0.67
    assert set(found) == allowed


def test_the_seed_decides_and_nothing_else() -> None:
    one = draws([0.0] * 50, 20, temperature=1.0, seed=9)
    assert one == draws([0.0] * 50, 20, temperature=1.0, seed=9)
    assert one != draws([0.0] * 50, 20, temperature=1.0, seed=10)


def test_a_request_draws_the_same_alone_and_in_a_batch() -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    alone = sample(logits[1:2], [params], [params.generator()])
    others = [SamplingParams(), params, SamplingParams(temperature=1.0, seed=5)]
    batched = sample(logits, others, [p.generator() for p in others])
    assert batched[1:2] == alone
    assert batched[0] == int(logits[0].argmax())


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_impossible_values_are_errors(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        SamplingParams(**options)  # type: ignore[arg-type]
