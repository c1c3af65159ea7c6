"""What a recipe is: a layer's call, the planning of a step, and who writes the KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.direct.stage import Stage

if TYPE_CHECKING:
    from anyattn.kernels.triton.attention import Cache

__all__ = ["NoRecipe", "Recipe", "triton_cache", "writer"]


class NoRecipe(Exception):
    """This build of the library isn't called directly here."""


@dataclass(frozen=True)
class Recipe:
    """One library, called directly on the stage's pool.

    Attributes:
        name: the call. write: who stores the KV in `call`.
        call: attention of layer i of a planned step, its KV write included; allocates its output.
        plan: the library's own planning of a decode step from arrays on the host, or None without any:
            `plan(number)` for one of the stage's steps.
    """

    name: str
    write: str
    call: Callable[[int], object]
    plan: Callable[[int], object] | None = None


def writer(stage: Stage) -> tuple[str, Callable[[int], None]]:
    """`(name, write)`: anyattn's Triton kernel called bare; on a CPU and for latents, indexed copies."""
    pool, loc, k, v = stage.pool, stage.loc, stage.k, stage.v
    if stage.shape.mla or v is None or stage.device.type == "cpu":

        def copy(layer: int) -> None:
            for cache, new in zip(pool.caches(layer), (k, v), strict=False):
                assert new is not None
                cache.view(-1, *cache.shape[2:]).index_copy_(0, loc, new)

        return "torch index_copy_", copy

    from anyattn.kernels.triton import attention as kernels

    caches = [triton_cache(stage, layer) for layer in range(stage.shape.layers)]

    def write(layer: int) -> None:
        kernels.kv_write(k, v, caches[layer], loc)

    return "anyattn's Triton kv_write", write


def triton_cache(stage: Stage, layer: int) -> Cache:
    """A layer's K and V as the Triton kernels take them."""
    from anyattn.kernels.triton.attention import Cache

    one = torch.ones(1, device=stage.device)
    pool = stage.pool
    return Cache.of(pool.key_cache(layer), pool.value_cache(layer), pool.layout, one, one, False)
