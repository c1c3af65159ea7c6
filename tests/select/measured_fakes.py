"""Small measured tables for the fake host, and requests of its shape."""

from __future__ import annotations

from typing import Any

from select_fakes import KLIB, SPEC, both, host, library, record, request, row, run

from anyattn import __version__
from anyattn.core.measure import Bucket, MeasuredTable, Provenance, Role, Shape, Timing
from anyattn.core.select.decision import Decision
from anyattn.core.spec import AttentionSpec

__all__ = ["AB", "BY_SIZE", "FAST_B", "HERE", "SHAPE", "bucket", "decided", "entry", "prefill", "table"]

SHAPE = Shape.of(SPEC, "bfloat16", "bfloat16")


def bucket(**fields: Any) -> Bucket:
    """A decode bucket of 64 x 8k under graphs; `spec` for another shape."""
    spec: AttentionSpec | None = fields.pop("spec", None)
    shape = SHAPE if spec is None else Shape.of(spec, "bfloat16", "bfloat16")
    defaults: dict[str, Any] = {
        "role": Role.DECODE,
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


AB = (record("a", row(providers=(KLIB,))), record("b"))
HERE = host("x1", library("2.1.7"))


def prefill(**fields: Any) -> Bucket:
    return bucket(**({"role": Role.PREFILL, "run": "eager", "requests": 1, "new_tokens": 8192} | fields))


def decided(
    measured: MeasuredTable | None, facts: object = HERE, records: Any = AB, **asked: Any
) -> Decision:
    tables = [] if measured is None else [measured]
    return run(records, request(**asked), facts, both("a"), tables=tables)  # type: ignore[arg-type]


FAST_B = {bucket(): entry(a=300, b=100), prefill(): entry(a=300, b=100)}
BY_SIZE = {
    bucket(requests=1, kv_len=1024): entry(a=10, b=50),
    bucket(requests=64, kv_len=8192): entry(a=200, b=100),
    prefill(new_tokens=256): entry(a=10, b=20),
    prefill(new_tokens=8192): entry(a=200, b=100),
}
