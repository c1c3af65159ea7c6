"""Prefill and extend on a GPU, our backends beside FA3 and FlashInfer called directly.

python -m benchmarks.attention.extend [--cells 0,4] [--json out.json]
"""

from __future__ import annotations

from benchmarks.attention.cells import EXTEND
from benchmarks.attention.peers import extend_peers
from benchmarks.attention.run import run_grid

if __name__ == "__main__":
    run_grid("extend", EXTEND, extend_peers)
