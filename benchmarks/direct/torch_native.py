"""torch's SDPA over gathered KV: what the reference backend does at its simplest. For smoke tests."""

from __future__ import annotations

import torch

from benchmarks.direct.recipe import NoRecipe, Recipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["torch_native"]


def torch_native(stage: Stage) -> Recipe:
    """All requests have the same length, so one SDPA call takes them together."""
    if stage.shape.mla or stage.pool.layout != "NHD":
        raise NoRecipe("called directly for dense NHD layers only")
    slots = stage.table.req_to_token[: stage.shape.requests, : stage.shape.length].long()
    name, write = writer(stage)

    def rows(cache: torch.Tensor) -> torch.Tensor:
        return cache.view(-1, *cache.shape[2:])[slots].transpose(1, 2)

    def call(layer: int) -> torch.Tensor:
        write(layer)
        k, v = rows(stage.pool.key_cache(layer)), rows(stage.pool.value_cache(layer))
        out = torch.nn.functional.scaled_dot_product_attention(stage.q[:, :, None], k, v, enable_gqa=True)
        return out[:, :, 0]

    return Recipe("gather + scaled_dot_product_attention", name, call)
