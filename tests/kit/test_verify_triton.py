"""`anyattn verify triton` on a CPU: the command asks for Triton's interpreter by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.interpreter
def test_quick_run_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="the portable extra isn't installed")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "anyattn.cli.main", "verify", "triton", "--device", "cpu", "--json"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    found = json.loads(done.stdout)
    assert found["failed"] == []
    assert done.returncode == 0
    assert found["host"]["kernels"] == "interpreted"
    assert found["passed"] > 120
    assert found["coverage"]["pairs_covered"] == found["coverage"]["pairs_possible"] > 2000
