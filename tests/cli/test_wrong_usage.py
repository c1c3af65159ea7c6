"""Commands used wrongly: one line that says asked, allowed and next, exit code 2, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anyattn.cli.main import main


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that refuses."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("anyattn: ")
    for part in ("asked: ", "allowed: ", "Next: "):
        assert part in line, f"no {part!r} in: {line}"
    return line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("select --head-dim x", "value of --head-dim; asked: 'x'; allowed: a whole number"),
        ("select --scale x", "allowed: a number"),
        ("select --scale 0", "leave --scale out"),
        ("select --scale nan", "finite"),
        ("select --kind liner", "did you mean 'linear'"),
        ("select --attention causl", "did you mean 'causal'"),
        ("select --head-dim", "allowed: one argument"),
        ("select --q-heads 0", "asked: 0; allowed: >= 1. Next: give AttentionSpec.num_q_heads >= 1"),
        ("select --head-dim -5", "asked: -5; allowed: >= 1. Next: give AttentionSpec.head_dim >= 1"),
        ("select --page-size 0", ">= 1"),
        ("select --window 0", ">= 1"),
        ("select --logit-cap -3", "> 0"),
        ("select --draft-tokens -1", ">= 0"),
        ("select --mla 1,2", "four sizes"),
        ("select --head-dim 99999999 --assume cpu:avx2", "1..1024"),
        ("select --backend flashinfer --assume cpu:avx2", "torch_native"),
        ("select --backend nonsense", "unknown backend"),
        ("select --assume cuda:sm91", "did you mean 'cuda:sm90'"),
        ("select --bakend triton", "did you mean '--backend'"),
        ("doctor --timeout nan", "seconds"),
        ("doctor --assume cpu:avx2 --probe", "simulated"),
        ("backends --why nobody", "unknown backend"),
        ("verify-compile --target sm_1", "unknown target"),
        ("verify-compile --write /nowhere/t.md", "--write can't be written; asked: /nowhere/t.md: no folder"),
        ("verify torch_native --write /nowhere/t.md", "--write can't be written; asked: /nowhere/t.md: no"),
        ("verify triton --device cpu --write /nowhere/t.md", "--write can't be written"),
        ("verify torch_native --workers 0", "--workers; asked: 0; allowed: >= 1"),
        ("verify torch_native --check nubmers", "did you mean 'numbers'"),
        (
            "verify",
            "asked: nothing for backend; allowed: anyattn verify backend [options]. Next: `anyattn ver",
        ),
        ("diff", "asked: nothing for OLD, NEW; allowed: anyattn diff OLD NEW [options]"),
        ("diff a.json", "asked: nothing for NEW; allowed: anyattn diff OLD NEW [options]"),
        (
            "verify torch_native --full --quick",
            "asked: --quick and --full; allowed: one of them. Next: leave",
        ),
        ("verify torch_native --check merge", "--check is for --case; asked: --check merge"),
        ("generate --prompt hi --page-size x", "a whole number"),
        ("generate --prompts missing.txt", "No such file"),
        ("generate --prompt hi --max-new-tokens -1", ">= 1"),
        ("generate --prompt hi --temperature nan", "temperature"),
        ("generate --prompt hi --seed -1", "seed"),
        ("generate --prompt hi --device npu", "can't drive the device; asked: npu"),
        ("generate", "at least one prompt"),
    ],
)
def test_refusals(argv: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(argv.split(), capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "at least one prompt"),
        (b"  \n\n", "at least one prompt"),
        (b"[]", "at least one prompt"),
        (b'["", "hi"]', "without text"),
        (b"\xff\xfe\x00bad", "UTF-8"),
        (b'["a", "b"', "broken JSON"),
        (b"[1, 2]", "a list of strings"),
    ],
)
def test_files_of_prompts(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(content)
    assert words in refusal(["generate", "--prompts", str(path)], capsys)


@pytest.mark.parametrize("command", ["select", "backends", "generate --prompt hi", "verify-compile --list"])
def test_a_misspelt_variable_stops_every_command(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYATTN_BACKENDD", "x")
    assert "did you mean 'ANYATTN_BACKEND'" in refusal(command.split(), capsys)
    monkeypatch.delenv("ANYATTN_BACKENDD")
    monkeypatch.setenv("ANYATTN_CHECKS", "maybe")
    assert "off, host, full" in refusal(command.split(), capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "generate --prompt hi"])
def test_a_device_that_is_not_here_is_told_as_select_tells_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(["select", "--device", "cuda"], capsys)
    assert refusal([*command.split(), "--device", "cuda"], capsys) == told


def test_doctor_says_that_an_assumed_host_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYATTN_ASSUME", "cuda:sm9")
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("ANYATTN_ASSUME=cuda:sm9: unknown ")
    assert "did you mean 'cuda:sm90'" in problem
    monkeypatch.setenv("ANYATTN_ASSUME", "cuda:sm90")
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem == "ANYATTN_ASSUME=cuda:sm90: selections are made for that host"


def test_doctor_reports_a_misspelt_variable_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYATTN_BACKENDD", "x")
    assert main(["doctor", "--assume", "cpu:avx2", "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "ANYATTN_BACKENDD" in problem
