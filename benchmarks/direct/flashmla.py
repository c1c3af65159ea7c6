"""FlashMLA's dense decode; its scheduling metadata is filled by the first call and shared by the layers."""

from __future__ import annotations

import inspect
from typing import Any

from benchmarks.direct.recipe import NoRecipe, Recipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["flashmla"]


def flashmla(stage: Stage) -> Recipe:
    """`flash_mla_with_kvcache` on pages of 64 latents (`use_legacy` where the build asks for it)."""
    if not stage.shape.mla:
        raise NoRecipe("FlashMLA runs latent layers only: --mla")
    import flash_mla as library  # type: ignore[import-not-found,unused-ignore]

    attend = library.flash_mla_with_kvcache
    spec, pool = stage.shape.spec(), stage.pool
    metadata, _ = library.get_mla_metadata()
    options: dict[str, Any] = {
        "head_dim_v": spec.v_head_dim, "tile_scheduler_metadata": metadata, "num_splits": None,
        "softmax_scale": spec.scale, "causal": True,
    }  # fmt: skip
    if "use_legacy" in inspect.signature(attend).parameters:
        options["use_legacy"] = True
    query = stage.q[:, None]
    caches = [pool.latent_cache(i) for i in range(stage.shape.layers)]
    name, write = writer(stage)

    def call(layer: int) -> object:
        write(layer)
        return attend(
            query, caches[layer], block_table=stage.pages, cache_seqlens=stage.lens, **options
        )[0]  # fmt: skip

    return Recipe("flash_mla_with_kvcache", name, call, lambda step: library.get_mla_metadata())
