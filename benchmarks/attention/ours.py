"""Our backends as candidates: a planned step, then the layer call that reads everything from the pool."""

from __future__ import annotations

from collections.abc import Callable

import torch

import anyattn
from anyattn.bench.harness import Candidate
from benchmarks.attention.cells import Scene

__all__ = ["layer_candidate"]


def layer_candidate(name: str, scene: Scene) -> Candidate:
    """One attention layer without its KV write, per copy; plans are made beforehand and kept alive."""
    out = torch.empty_like(scene.q)

    def prepared(copy: int) -> Callable[[], object]:
        batch = scene.batch(copy)
        plan = scene.backend.init_forward_metadata(batch)

        def run() -> object:
            with anyattn.forward_context(scene.backend, plan):
                return scene.layer(scene.q, None, None, batch, out=out)

        return run

    return Candidate(name, [prepared(copy) for copy in range(scene.copies)], scene.cell.work())
