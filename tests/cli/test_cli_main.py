"""The entry point: lazy commands, one-line errors, suggestions."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from pathlib import Path

import pytest

from anyattn.cli import main as entry
from anyattn.cli.main import COMMANDS, main
from anyattn.errors import SelectionError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command called `fake`, which tests change."""
    module = types.ModuleType("fake_command", "Does nothing.")
    module.add_arguments = lambda parser: parser.add_argument("--host")  # type: ignore[attr-defined]
    module.run = lambda args: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(entry.COMMANDS, "fake", ("fake_command", "a fake"))
    return module


def test_the_overview_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import anyattn

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"anyattn {anyattn.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["doctr"], ("unknown command", "did you mean 'doctor'")),
        (["--versio"], ("did you mean '--version'",)),
        (["fake", "--hots", "x"], ("unknown argument of anyattn fake", "'--hots'", "did you mean '--host'")),
        (["fake", "--hos=x"], ("'--hos'", "did you mean '--host'")),
        (["fake", "--jsn"], ("did you mean '--json'",)),
        (["fake", "extra"], ("'extra'",)),
    ],
)
def test_unknown_names_suggest(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str], argv: list[str], words: tuple[str, ...]
) -> None:
    assert main(argv) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.count("\n") == 1
    assert all(word in caught.err for word in words)


def test_arguments_and_exit_codes(command: types.ModuleType) -> None:
    seen: list[argparse.Namespace] = []
    command.run = lambda args: seen.append(args) or 7  # type: ignore[attr-defined]
    assert main(["fake", "--json", "--host", "cpu:amx"]) == 7
    assert (seen[0].json, seen[0].host) == (True, "cpu:amx")


def test_a_command_may_define_json_itself(command: types.ModuleType) -> None:
    command.add_arguments = lambda parser: parser.add_argument("--json", action="store_true", help="own")  # type: ignore[attr-defined]
    command.run = lambda args: int(args.json)  # type: ignore[attr-defined]
    assert main(["fake", "--json"]) == 1


def test_errors_are_one_line(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise SelectionError("nobody\ncan", asked="D 81", allowed="64", hint="use 64")

    command.run = fail  # type: ignore[attr-defined]
    assert main(["fake"]) == 2
    assert capsys.readouterr().err == "anyattn: nobody can; asked: D 81; allowed: 64. Next: use 64\n"


def test_other_errors_are_not_hidden(command: types.ModuleType) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command.run = fail  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        main(["fake"])


def test_a_command_whose_torch_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_command.py").write_text("raise RuntimeError('Failed to load the backend extension')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(entry.COMMANDS, "broken", ("broken_command", ""))
    assert main(["broken"]) == 2
    error = capsys.readouterr().err
    assert "RuntimeError: Failed to load" in error
    assert "run `anyattn doctor`" in error


def test_an_interrupt_is_quiet(command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = stop  # type: ignore[attr-defined]
    assert main(["fake"]) == 130
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_quiet() -> None:
    code = (
        "import sys, types\n"
        "from anyattn.cli import main as entry\n"
        "module = types.ModuleType('long'); sys.modules['long'] = module\n"
        "module.add_arguments = lambda parser: None\n"
        "module.run = lambda args: [print('x' * 1000) for _ in range(5000)] and 0\n"
        "entry.COMMANDS['long'] = ('long', '')\n"
        "sys.exit(entry.main(['long']))"
    )
    line = f'{sys.executable} -c "$CODE" | head -c 10'
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env={"CODE": code, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 0


def test_one_command_loads_no_other() -> None:
    code = (
        "import sys\n"
        "from anyattn.cli.main import main\n"
        "main(['doctor', '--assume', 'cpu:amx', '--json'])\n"
        "names = {'anyattn.cli.' + n for n in ('backends', 'select', 'generate')} | {'torch'}\n"
        "print(sorted(names & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == "[]\n"
