"""Shared by all tests: full run-time checks, one thread per process, memory that stays bounded."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("ANYATTN_CHECKS", "full")
# Threads of several test processes on few cores wait for each other; one thread each doesn't.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_GROWTH, _MOST = 512 << 20, 6 << 30
"""Bytes: growth after which dropped objects are looked for, and what a process may hold after a test."""

_settled = 0


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where that can't be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_logfinish() -> None:
    """Drop what earlier tests left: an expected error holds frames, those hold backends, and Python counts
    objects, not bytes, before it looks for such cycles. FlashInfer's workspaces (128 MiB each) made a process
    of 14 GB.
    """
    global _settled
    if _resident() > _settled + _GROWTH:
        gc.collect()
        _settled = _resident()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that run a process in Triton's interpreter come first: begun last, one would go on alone."""
    items.sort(key=lambda item: item.get_closest_marker("interpreter") is None)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: a test that collects garbage needn't look through it (some
    million objects, a second each time).
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A test that leaves a process of over 6 GiB fails: two share a small machine with what they start."""
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():  # with a driver's own memory there is no telling
        held = _resident()
        assert held < _MOST, f"{held / 2**30:.1f} GiB are held after this test"
