"""Bench results and tables in small."""

from __future__ import annotations

from typing import Any

__all__ = ["cell", "result"]


def cell(times: dict[str, tuple[float, float]], *, mode: str = "graph", **fields: Any) -> dict[str, Any]:
    """One timed cell: name -> (microseconds, spread); names in capitals are peers."""
    defaults = {
        "name": "decode-64x8k", "workload": "decode", "step": "decode", "batch": 64, "prefix": 8191, "new": 1,
        "num_q": 32, "num_kv": 8, "dim": 128, "v_dim": 128, "page": 16, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "window": None,
    }  # fmt: skip
    results = [
        {
            "name": name,
            "kind": "peer" if name.isupper() else "backend",
            "counts": True,
            "median_s": value * 1e-6,
            "spread": spread,
            "rounds": 5,
        }
        for name, (value, spread) in times.items()
    ]
    return {"cell": defaults | fields, "mode": mode, "results": results, "skipped": []}


def result(*cells: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A bench result of the fake GPU."""
    defaults = {
        "schema": "anyattn.bench/1",
        "device": "Fake GPU",
        "arch": "cuda:x1",
        "versions": {"torch": "2.13.0", "anyattn": "0.1.0", "klib": "2.1"},
        "date": "2026-11-29T22:00Z",
        "commit": "abc1234",
        "limits": {},
        "command": "anyattn bench --json out.json",
        "units": 132,
    }
    return defaults | {"cells": list(cells)} | fields
