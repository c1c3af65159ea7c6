"""benchmarks/demo_logits.py: teacher forcing reaches every position, and what is off is found."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_random_model import plain_logits, random_checkpoint

from anyattn.demo.model import LlamaModel
from anyattn.demo.weights import Checkpoint
from benchmarks import demo_logits
from benchmarks.demo_logits import Text, compare, logits_of, main, reference_texts, run
from benchmarks.demo_noise import EXACT, Bounds


def texts() -> list[Text]:
    """Three texts: a prompt of several chunks, a short one, one without a continuation."""
    rng = random.Random(0)
    sizes = ((57, 9), (3, 14), (30, 0))
    return [Text(tuple(rng.randrange(97) for _ in range(p + n)), p) for p, n in sizes]


def test_every_position_has_the_plain_decoders_logits() -> None:
    model = LlamaModel(random_checkpoint(), max_context=128)
    found = logits_of(model, texts(), "torch_native", "torch_native")
    for text, rows in zip(texts(), found, strict=True):
        assert rows.shape == (len(text.ids), 97)
        for position in (0, text.prompt - 1, len(text.ids) - 1):
            want = plain_logits(list(text.ids[: position + 1]))
            assert float((rows[position].double() - want).abs().max()) < 1e-3


def test_pairs_and_dtypes() -> None:
    pairs = [("torch_native", "torch_native")]
    exact, half = run(random_checkpoint(), texts(), pairs, ["float32", "bfloat16"], "cpu")
    assert (exact.ok, exact.max_difference, exact.flips) == (True, 0.0, 0)
    assert exact.positions == half.positions == 66 + 17 + 30
    assert half.max_difference > 1e-3  # the dtype was really used


def test_what_is_off_is_a_failure() -> None:
    (text,) = given = [Text((1, 2, 0, 1), 2, gaps=(1.0, 1.0))]
    want = torch.tensor([[0.0, 9.0, 1.0], [9.0, 8.9, 0.0], [0.0, 9.0, 1.0], [1.0, 0.0, 9.0]])

    def held(got: torch.Tensor, dtype: str = "float32", tokens: Text = text) -> demo_logits.Comparison:
        bounds = {"float32": EXACT, "bfloat16": Bounds(5e-2, 5e-2)}[dtype]
        return compare([tokens], [want], [got], "a", "b", dtype, bounds)

    assert held(want).ok
    assert held(want).wrong_tokens == 0
    assert not held(want + 0.01).ok  # beyond 1e-4 of the range
    assert held(want + 0.01, "bfloat16").ok
    swapped = want.clone()
    swapped[1] = torch.tensor([8.9, 9.0, 0.0])  # float32's margin of 0.1 is within bfloat16's bound
    assert (held(swapped, "bfloat16").flips, held(swapped, "bfloat16").sure_flips) == (1, 0)
    assert held(swapped).sure_flips == 1
    assert held(swapped).wrong_tokens == 1
    assert held(swapped, tokens=replace(text, gaps=(1e-3, 1.0))).wrong_tokens == 0  # a tie
    broken = want.clone()
    broken[3, 0] = torch.nan
    assert not held(broken, "bfloat16").ok
    assert given


@pytest.mark.model
def test_command_on_the_real_model(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo_logits, "load_gguf", lambda path: checkpoint)
    out = tmp_path / "out.json"
    options = ["--dtype", "float32,bfloat16", "--texts", "1", "--json", str(out)]
    assert main(options) == 0
    exact, half = json.loads(out.read_text())["comparisons"]
    assert (exact["wrong_tokens"], exact["ok"], half["ok"]) == (0, True, True)
    assert half["max_share"] > 1e-3
    assert capsys.readouterr().out.count("ok  ") == 2


def test_every_pair_of_usable_backends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_logits, "load_gguf", lambda path: random_checkpoint())
    monkeypatch.setattr(demo_logits, "reference_texts", lambda limit: texts())
    monkeypatch.setattr(demo_logits, "_weights", lambda path: Path("x"))
    out = tmp_path / "out.json"
    options = ["--dtype", "float32", "--pairs", "--json", str(out)]
    assert main([*options, "--backends", "every"]) == 0
    record = json.loads(out.read_text())
    pairs = [(c["prefill"], c["decode"]) for c in record["comparisons"]]
    assert ("torch_native", "torch_native") in pairs
    assert len(set(pairs)) == len(pairs)
    assert record["failed"] == {}
    text = capsys.readouterr().out
    assert f"{len(pairs)} pairs, prefill+decode: " in text
    assert f"all {len(pairs)} within bounds" in text
    assert main([*options, "--backends", "torch_native,fa3"]) == 0
    refused = json.loads(out.read_text())["refused"]
    assert set(refused) == {"torch_native+fa3", "fa3+torch_native", "fa3+fa3"}
    assert "not  fa3+fa3: " in capsys.readouterr().out


def test_a_pair_that_ends_in_an_error_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> list[torch.Tensor]:
        if calls:
            raise RuntimeError("it exits")
        calls.append(1)
        return logits_of(*args)  # type: ignore[arg-type]

    calls: list[int] = []
    monkeypatch.setattr(demo_logits, "load_gguf", lambda path: random_checkpoint())
    monkeypatch.setattr(demo_logits, "reference_texts", lambda limit: texts())
    monkeypatch.setattr(demo_logits, "_weights", lambda path: Path("x"))
    monkeypatch.setattr(demo_logits, "logits_of", broken)
    assert main(["--dtype", "float32", "--pairs", "--backends", "torch_native"]) == 1
    assert "FAIL torch_native+torch_native: RuntimeError: it exits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [["--weights", "missing.gguf"], ["--dtype", "int8"], ["--backends", "nonsense"]],
)
def test_what_can_not_be_run(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_logits, "load_gguf", lambda path: random_checkpoint())
    monkeypatch.setattr(demo_logits, "reference_texts", lambda limit: texts())
    if options[0] != "--weights":
        monkeypatch.setattr(demo_logits, "_weights", lambda path: Path("x"))
    assert main(options) == 2
    assert options[1] in capsys.readouterr().err


@pytest.mark.parametrize(("backends", "words"), [("tritn", "did you mean 'triton'?"), ("fa3", "fa3")])
def test_a_backend_that_can_not_be_run_is_told_before_the_reference_is_computed(
    backends: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_logits, "load_gguf", lambda path: random_checkpoint())
    monkeypatch.setattr(demo_logits, "reference_texts", lambda limit: texts())
    monkeypatch.setattr(demo_logits, "_weights", lambda path: Path("x"))
    monkeypatch.setattr(demo_logits, "logits_of", lambda *_: pytest.fail("it is computed"))
    assert main(["--backends", f"torch_native,{backends}"]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("demo_logits: ")
    assert words in found.err
    assert found.out == ""


def test_reference_texts() -> None:
    every, two = reference_texts(), reference_texts(2)
    assert len(every) > len(two) == 2
    assert max(len(t.ids) for t in two) <= min(len(t.ids) for t in every if t not in two)
    assert all(len(t.gaps) == len(t.ids) - t.prompt for t in every)
