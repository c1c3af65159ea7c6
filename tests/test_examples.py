"""Every example runs as it stands, in a process of its own, and prints what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROMISED = {
    "merge_states.py": "largest difference from 48 at once",
    "mixed_batch.py": "3 requests, 41 tokens in one step",
    "other_machines.py": "rocm:gfx942  dense",
}


def test_all_examples_are_known() -> None:
    assert {path.name for path in EXAMPLES} == set(PROMISED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    assert PROMISED[path.name] in done.stdout
    assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")
