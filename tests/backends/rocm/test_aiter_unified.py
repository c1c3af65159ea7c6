"""Runs AITER's own Triton `unified_attention` in Triton's interpreter, where its sources are installed.

The `amd-aiter` wheel ships them and is no GPU's: unpacked on `PYTHONPATH` is enough.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
sys.path.insert(0, str(FOLDER))

from unified_source import sources  # noqa: E402


@pytest.mark.interpreter
@pytest.mark.skipif(sources() is None, reason="the sources of amd-aiter aren't installed")
def test_aiters_own_kernel() -> None:
    pytest.importorskip("triton", reason="the portable extra isn't installed")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(FOLDER)]
    root = FOLDER.parents[3]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed|\[100%\]", done.stdout), done.stdout[-500:]
