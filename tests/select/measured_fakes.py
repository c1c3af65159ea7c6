"""Small measured tables for the fake host, and requests of its shape."""

from __future__ import annotations

from typing import Any

from select_fakes import SPEC

from anyattn import __version__
from anyattn.core.capabilities import Phase
from anyattn.core.measure import Bucket, MeasuredTable, Provenance, Shape, Timing
from anyattn.core.spec import AttentionSpec

__all__ = ["SHAPE", "bucket", "entry", "table"]

SHAPE = Shape.of(SPEC, "bfloat16", "bfloat16")


def bucket(**fields: Any) -> Bucket:
    """A decode bucket of 64 x 8k under graphs; `spec` for another shape."""
    spec: AttentionSpec | None = fields.pop("spec", None)
    shape = SHAPE if spec is None else Shape.of(spec, "bfloat16", "bfloat16")
    defaults: dict[str, Any] = {
        "phase": Phase.DECODE,
        "shape": shape,
        "page": 16,
        "layout": "NHD",
        "run": "graph",
        "requests": 64,
        "kv_len": 8192,
    }
    return Bucket(**(defaults | fields))


def entry(spread: float = 0.01, **microseconds: float) -> dict[str, Timing]:
    """Times by backend."""
    return {name: Timing(value * 1e-6, spread) for name, value in microseconds.items()}


def table(entries: dict[Bucket, dict[str, Timing]], **fields: Any) -> MeasuredTable:
    """A table of the fake GPU as it is."""
    defaults: dict[str, Any] = {
        "device": "Fake GPU",
        "arch": "cuda:x1",
        "versions": {"anyattn": __version__, "torch": "2.13.1+cu130", "klib": "2.1.0"},
        "date": "2026-11-29",
        "commit": "abc1234",
        "command": "anyattn bench",
    }
    return MeasuredTable(Provenance(**(defaults | fields)), entries, "fake")
