"""Decode on a GPU, L2-cold, our backends beside FlashInfer and FA3 called directly.

python -m benchmarks.attention.decode --graph [--cells 0,3] [--json out.json]
"""

from __future__ import annotations

from benchmarks.attention.cells import DECODE
from benchmarks.attention.peers import decode_peers
from benchmarks.attention.run import run_grid

if __name__ == "__main__":
    run_grid("decode", DECODE, decode_peers)
