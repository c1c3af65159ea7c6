"""Which backends serve the model of a `GraphSetup`, so that the one under test runs the captured mode."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import Feature
from anyattn.core.dtypes import torch_dtype
from anyattn.core.select.decision import Decision
from anyattn.errors import SelectionError
from anyattn.testing.graph_setup import GraphSetup
from anyattn.testing.selecting import select_for

__all__ = ["decide_for"]

_PHASE_OF = {
    ForwardMode.DECODE: "decode",
    ForwardMode.TARGET_VERIFY: "verify",
    ForwardMode.DRAFT_EXTEND: "draft",
}


def decide_for(
    setup: GraphSetup, backend: str, device: str, host: str | None, limits: anyattn.Limits
) -> Decision:
    """`backend` for every phase; where it doesn't serve all, for those it can, beside the reference."""
    sizes = setup.sizes
    options: dict[str, Any] = {
        "dtype": torch_dtype(sizes.dtype), "kv_dtype": torch_dtype(sizes.dtype), "device": device,
        "host": host, "page_size": sizes.page_size, "layout": sizes.layout, "limits": limits,
        "features": [Feature.EXPLICIT_MASK] if setup.mask is not None else [],
    }  # fmt: skip
    own = _PHASE_OF[setup.mode]
    ways: list[dict[str, str]] = [
        {"backend": backend},
        {"prefill": "torch_native", "decode": backend},
        {"prefill": backend, "decode": "torch_native"},
        {"prefill": "torch_native", "decode": "torch_native"} | {own: backend},
    ]
    # The first refusal is raised where it was caught: kept in a local, it would hold the frames of all
    # callers in a cycle, with the backends among them.
    first, *others = ways
    try:
        return select_for(setup.specs(), **options, **first)
    except SelectionError:
        for way in others:
            with suppress(SelectionError):
                return select_for(setup.specs(), **options, **way)
        raise
