"""anyattn's own Triton kernels, called bare with the tiles and workspace of the backend's plan."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.direct.recipe import NoRecipe, Recipe, triton_cache, writer
from benchmarks.direct.stage import Stage

__all__ = ["triton"]


def triton(stage: Stage) -> Recipe:
    """`kv_write` and `decode` of `anyattn.kernels.triton.attention`; there is no planning apart from ours."""
    if stage.shape.mla:
        raise NoRecipe("the latent kernels aren't called directly here")
    from anyattn.kernels.triton import attention as kernels
    from anyattn.kernels.triton.decode_launch import decode

    backend: Any = stage.backend
    plan = backend.init_forward_metadata(stage.batches[0])
    group, layer = stage.layers[0].plan_group, stage.layers[0].spec
    step = plan.private.decode[group]
    heads = kernels.Heads(layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
    variant = kernels.Variant(layer.scale)
    caches = [triton_cache(stage, i) for i in range(stage.shape.layers)]
    name, write = writer(stage)

    def call(number: int) -> torch.Tensor:
        write(number)
        out = torch.empty_like(stage.q)
        decode(stage.q, caches[number], step, heads, variant, out, None)
        return out

    return Recipe("kernels.triton.decode_launch.decode", name, call)
