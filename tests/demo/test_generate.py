"""`anyattn generate`: prompts in, JSON or text out, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from demo_reference import assert_agrees, cases

from anyattn.cli import generate
from anyattn.cli.generate import add_arguments, read_prompts
from anyattn.cli.main import main
from anyattn.demo import session
from anyattn.demo.weights import Checkpoint
from anyattn.errors import ConfigError, UnknownNameError

CASES = cases()


@pytest.fixture
def _loaded(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't read the file again for each command."""
    monkeypatch.setattr(session, "load_gguf", lambda path: checkpoint)


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.model
@pytest.mark.usefixtures("_loaded")
def test_json_of_a_file_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([c.prompt for c in CASES]), encoding="utf-8")
    options = "--max-new-tokens 8 --greedy --dtype float32 --backend torch_native --page-size 16 --chunk 64"
    assert main(["generate", "--prompts", str(path), *options.split(), "--max-batch", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [sorted(record) for record in found] == [["ids", "prompt", "prompt_ids", "text"]] * len(CASES)
    for case, record in zip(CASES, found, strict=True):
        assert (record["prompt"], record["prompt_ids"]) == (case.prompt, case.prompt_ids)
        assert_agrees(case, record["ids"], "command")
        assert case.text.startswith(record["text"].rstrip("\ufffd"))


@pytest.mark.model
@pytest.mark.usefixtures("_loaded")
def test_the_demo_shows_machine_decision_texts_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--demo", "--max-new-tokens", "5", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("Machine: ")
    assert any("torch" in line and line.strip().startswith("decode") for line in lines)
    assert "Paris" in shown
    assert [line[:3] for line in lines if line.startswith("[")] == ["[1]", "[2]", "[3]", "[4]"]
    assert any(line.startswith("Decode ") and "tokens/s" in line for line in lines)
    saved = next(line for line in lines if line.startswith("Prefix reuse saved"))
    assert int(saved.split()[3]) >= 64


@pytest.mark.model
@pytest.mark.usefixtures("_loaded")
def test_drafts_are_reported_beside_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--demo --speculate ngram --draft-tokens 6 --max-new-tokens 12 --device cpu --dtype float32 --json"
    )
    assert main(["generate", *options.split()]) == 0
    found = json.loads(capsys.readouterr().out)["statistics"]["speculation"]
    assert found["same_text"] is True
    assert found["draft_tokens"] == 6
    assert 0 <= found["accepted"] <= found["drafted"]
    assert found["tokens_per_s"] > 0 < found["plain_tokens_per_s"]


@pytest.mark.model
@pytest.mark.usefixtures("_loaded")
def test_chat_wraps_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "What is the capital of France?"
    assert main(["generate", "--prompt", prompt, "--chat", "--device", "cpu", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["prompt"] == prompt
    assert found["prompt_ids"] == CASES[-1].prompt_ids
    assert found["text"] == "The capital of France is Paris."
    assert found["ids"][-1] == 2  # the end-of-answer token is an id, and no text


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\n\n  two \nthree", ["one", "  two ", "three"]),
        ('["a\\nb", " c"]', ["a\nb", " c"]),
        ("[1] is no JSON list\nsecond", ["[1] is no JSON list", "second"]),
        ("", []),
    ],
)
def test_files_of_prompts(tmp_path: Path, text: str, prompts: list[str]) -> None:
    (tmp_path / "p").write_text(text, encoding="utf-8")
    assert read_prompts(str(tmp_path / "p")) == prompts


def test_unreadable_prompts_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_prompts(str(tmp_path / "missing"))
    (tmp_path / "numbers").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="a list of strings"):
        read_prompts(str(tmp_path / "numbers"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no prompts"),
        (["--demo", "--prompt", "x"], "brings its own prompts"),
        (["--prompt", "x", "--greedy", "--temperature", "1"], "--greedy takes no --temperature"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
    ],
)
def test_options_that_contradict_are_errors(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate.run(parsed(*options))


def test_drafting_options_that_cannot_be() -> None:
    with pytest.raises(UnknownNameError, match="ngram"):
        generate.run(parsed("--prompt", "x", "--speculate", "ngrm"))
    with pytest.raises(ConfigError, match="--draft-tokens without drafts"):
        generate.run(parsed("--prompt", "x", "--draft-tokens", "4"))


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="bfloat16"):
        generate.run(parsed("--prompt", "x", "--dtype", "bf16"))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_an_error(device: str) -> None:
    with pytest.raises(ConfigError, match=f"asked: '?{device}"):
        generate.run(parsed("--prompt", "x", "--device", device))


def test_sampling_options() -> None:
    assert generate._params(parsed()).greedy
    assert generate._params(parsed("--temperature", "0")).greedy
    nucleus = generate._params(parsed("--top-p", "0.9", "--seed", "4"))
    assert (nucleus.temperature, nucleus.top_p, nucleus.seed) == (1.0, 0.9, 4)
