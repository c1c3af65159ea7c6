"""Runs every file of `tests/kernels/interpreter` in a process of its own, in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is decorated: interpreted and compiled kernels can't share a
process. A new file there needs nothing here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the portable extra isn't installed")

HERE = Path(__file__).resolve().parent
FILES = sorted((HERE / "interpreter").glob("test_*.py"))


def run_pytest(path: Path, *options: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(path)]
    root = HERE.parent.parent
    return subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=540)


@pytest.mark.interpreter
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem.removeprefix("test_"))
def test_kernels_in_the_interpreter(file: Path) -> None:
    done = run_pytest(file, "-rfEs", interpret=True)
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    print(summary)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) > 0, summary
    assert "skipped" not in summary, f"an interpreter test must run, not skip: {summary}"


def test_files_are_found_and_need_the_variable() -> None:
    """In a process without the variable the same files must not be collected: they would compile."""
    assert FILES
    done = run_pytest(HERE / "interpreter", "--collect-only", interpret=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
