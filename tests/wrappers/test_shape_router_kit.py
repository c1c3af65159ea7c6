"""The conformance kit and the graph checks, on routers whose members take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def run(*arguments: str) -> Any:
    """What `routed_kit.py` printed, from a process with Triton's interpreter."""
    pytest.importorskip("triton", reason="the portable extra isn't installed")
    done = subprocess.run(
        [sys.executable, str(HERE / "routed_kit.py"), *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.interpreter
def test_the_kit_passes_whoever_takes_the_step() -> None:
    found = run("kit", "20")
    assert found["failed"] == []
    assert found["passed"] > 20
    assert min(found["seen"]["eager triton"], found["seen"]["eager torch_native"]) > 10


@pytest.mark.interpreter
@pytest.mark.parametrize("setup", ["decode", "target_verify, chain", "target_verify, tree (qlen_only)"])
def test_a_graph_for_each_route_keeps_its_promises(setup: str) -> None:
    found = run("graphs", setup)
    assert found["failed"] == []
    assert set(found["passed"]) == {"keeps-alive", "padding", "replays", "staging"}
    assert min(found["seen"]["graph fa3"], found["seen"]["graph triton"]) > 3
