"""Kernels that libraries compile on first use, compiled ahead by several processes: no run waits for them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.engine import DeviceLost, Options, build_cell, describe

__all__ = ["build_all", "build_here", "shares"]


def shares(cells: Sequence[Cell], processes: int) -> list[list[Cell]]:
    """Neighbours in the grid compile alike, so they go to different processes."""
    return [list(cells[i::processes]) for i in range(min(processes, len(cells)))]


def build_here(cells: Sequence[Cell], device: torch.device, options: Options) -> None:
    """One process's share. Whoever fails is told; nothing is timed."""
    with torch.no_grad():
        for cell in cells:
            try:
                for name, why in build_cell(cell, device, options):
                    options.say(f"    {cell.name}: {name}: {why}")
            except DeviceLost:
                raise
            except Exception as failure:
                options.say(f"    {cell.name}: {describe(failure)}")


def build_all(cells: Sequence[Cell], processes: int, arguments: Sequence[str], options: Options) -> None:
    """`anyattn bench --build-here` with the same arguments, once for each share, at the same time."""
    started = time.monotonic()
    command = [sys.executable, "-m", "anyattn.cli.main", *arguments, "--build-here", "--cells"]
    running = [
        subprocess.Popen([*command, ",".join(cell.name for cell in share)], stdout=subprocess.DEVNULL)
        for share in shares(cells, processes)
    ]
    codes = [process.wait() for process in running]
    options.say(f"built in {time.monotonic() - started:.0f} s by {len(codes)} processes, exit codes {codes}")
