"""`anyattn verify`: the document, the exit codes, and failures that can be repeated."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anyattn.cli.main import main
from anyattn.testing.emulators import current_host, emulating
from anyattn.testing.mutants import MUTANTS, applied

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"backend", "host", "cases", "passed", "failed", "skipped", "coverage", "worst_error", "seconds"}


def test_quick_run_of_the_reference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "errors.md"
    assert main(["verify", "torch_native", "--device", "cpu", "--json", "--write", str(table)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == KEYS
    assert found["backend"] == "torch_native"
    assert found["failed"] == []
    assert found["cases"] == found["passed"] + len(found["skipped"])
    assert found["passed"] > 200
    assert found["coverage"]["pairs_covered"] == found["coverage"]["pairs_possible"] > 3000
    assert all(set(s) == {"case", "why"} and s["why"] for s in found["skipped"])
    assert found["worst_error"]["float32/float32/decode"] < 1e-5
    assert "## torch_native on cpu" in table.read_text()


def test_a_failure_exits_1_and_its_line_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(m for m in MUTANTS["torch_native"] if m.name == "window one key too wide")
    with applied(fault):
        assert main(["verify", "torch_native", "--device", "cpu", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        failure = found["failed"][0]
        assert set(failure) == {"name", "check", "case", "why", "reproduce"}
        assert "window" in failure["why"] + failure["name"]
        assert found["cases"] == found["passed"] + len(found["failed"]) + len(found["skipped"])
        words = shlex.split(failure["reproduce"])
        assert words[0] == "anyattn"
        assert main(words[1:]) == 1
        assert "failed, error" in capsys.readouterr().out
    assert main(words[1:]) == 0
    assert "passed, error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such"], "unknown backend"),
        (["torch_natve"], "torch_native"),
        (["torch_native", "--device", "cpu", "--check", "nubmers", "--case", "Case()"], "numbers"),
        (["torch_native", "--device", "cpu", "--case", "Case(window=-1"], "a case"),
        (["torch_native", "--device", "cpu", "--workers", "0"], "--workers"),
        (["fa3", "--device", "cpu"], "can't be verified"),
        (["fa3", "--device", "cpu"], "Next: --emulated runs it on a stand-in"),
        (["torch_native", "--device", "cpu", "--random", "0"], "--random; asked: 0; allowed: >= 1"),
        (
            ["torch_native", "--latent", "--device", "cpu", "--cases", "-1"],
            "--cases; asked: -1; allowed: >= 1",
        ),
        (["torch_native", "--device", "cpu", "--cases", "5"], "Next: add --full"),
        (["torch_native", "--device", "cpu", "--full", "--random", "2", "--cases", "5"], "or --random N"),
        (["torch_native", "--ful"], "--full"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_stand_in_that_does_not_serve_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with emulating("fa3"):  # the command installs stand-ins for its process; this one goes on
        assert main(["verify", "fa3", "--emulated", "--assume", "cpu:amx"]) == 2
    assert "Next: `anyattn backends` lists what cpu:amx can run" in capsys.readouterr().err
    assert current_host() is None


@pytest.mark.parametrize("more", [["--random", "2"], ["--graphs"], ["--latent"]])
def test_a_machine_that_is_assumed_runs_nothing(
    more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANYATTN_ASSUME", "cuda:sm90")
    assert main(["verify", "torch_native", *more]) == 2
    assert "Next: unset ANYATTN_ASSUME, or give --emulated --assume cuda:sm90" in capsys.readouterr().err


def test_a_case_that_is_not_declared_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    case = "Case(prefix_lens=(1,), extend_lens=(1,), head_dim=2048, v_head_dim=8)"
    main(["verify", "torch_native", "--device", "cpu", "--json", "--case", case])
    assert "head_dim" in json.loads(capsys.readouterr().out)["undeclared"]


def test_under_pytest(tmp_path: Path) -> None:
    """The same items as tests, from a folder that isn't the repository's."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "anyattn.testing"]
    command += ["--backend", "torch_native", "--device", "cpu", "-k", "window and decode"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
