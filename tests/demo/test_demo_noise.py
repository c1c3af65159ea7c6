"""benchmarks/demo_noise.py: the floor of a dtype, and that a backend which is wrong rises above it."""

from __future__ import annotations

import random

import pytest
import torch
from test_random_model import plain_logits, random_checkpoint

from anyattn.demo.model import LlamaModel
from benchmarks.demo_logits import Text, compare, logits_of
from benchmarks.demo_noise import EXACT, Bounds, bounds_of, exact_logits, shares


def _texts() -> list[Text]:
    rng = random.Random(1)
    return [Text(tuple(rng.randrange(97) for _ in range(n)), n // 2) for n in (40, 7, 60)]


def _reference() -> torch.Tensor:
    return torch.cat(logits_of(LlamaModel(random_checkpoint()), _texts(), "torch_native", "torch_native"))


def test_shares_are_of_each_rows_range() -> None:
    want = torch.tensor([[0.0, 10.0], [0.0, 2.0]])
    rows, rms = shares(want, want + torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert rows.tolist() == pytest.approx([0.1, 0.5])
    assert rms == pytest.approx(((0.01 + 0.25) / 4) ** 0.5)
    rows, rms = shares(want, torch.tensor([[0.0, torch.nan], [0.0, 2.0]]))
    assert rows.tolist() == [torch.inf, 0.0]
    assert rms == torch.inf


def test_exact_attention_is_the_plain_decoders_and_leaves_the_model_as_it_was() -> None:
    model = LlamaModel(random_checkpoint())
    before = [layer.attention for layer in model.layers]
    ids = _texts()[0].ids
    (rows,) = exact_logits(model, [ids])
    for position in (0, 17, 39):
        want = plain_logits(list(ids[: position + 1]))
        assert float((rows[position].double() - want).abs().max()) < 1e-3
    assert [layer.attention for layer in model.layers] == before


def test_a_right_backend_is_within_the_bounds_that_its_dtype_measures() -> None:
    texts, reference = _texts(), _reference()
    model = LlamaModel(random_checkpoint(), dtype=torch.bfloat16)
    bounds = bounds_of(model, [t.ids for t in texts], reference)
    assert bounds.floor is not None
    largest, rms = bounds.floor
    assert 1e-4 < rms < largest
    assert bounds.largest == pytest.approx(1.5 * largest)
    assert bounds.rms == pytest.approx(1.25 * rms)
    got = logits_of(model, texts, "torch_native", "torch_native")
    held = compare(texts, [reference], got, "a", "b", "bfloat16", bounds)
    assert held.ok, str(held)
    assert "attention in float64" in str(bounds)


def test_attention_that_is_slightly_wrong_is_not() -> None:
    texts, reference = _texts(), _reference()
    model = LlamaModel(random_checkpoint(), dtype=torch.bfloat16)
    bounds = bounds_of(model, [t.ids for t in texts], reference)
    for layer in model.layers:
        layer.out = lambda x, own=layer.out: own(x * 1.1)  # type: ignore[misc]
    got = logits_of(model, texts, "torch_native", "torch_native")
    assert not compare(texts, [reference], got, "a", "b", "bfloat16", bounds).ok


def test_float32_has_fixed_bounds() -> None:
    model = LlamaModel(random_checkpoint())
    assert bounds_of(model, [], torch.empty(0)) is EXACT
    assert "allowed" in str(Bounds(0.1, 0.2))
