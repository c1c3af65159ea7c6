"""FlashAttention-3 from whichever distribution the decision named."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from benchmarks.direct.recipe import NoRecipe, Recipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["fa3", "library_of"]

_MODULES = {
    "tokenspeed-fa3": "flash_attn_interface",
    "sglang-kernel": "sgl_kernel.flash_attn",
    "sgl-kernel": "sgl_kernel.flash_attn",
}
"""Distribution -> module of `flash_attn_with_kvcache`; vLLM's bundle has other arguments."""


def library_of(stage: Stage) -> tuple[Any, str]:
    """The module that has `flash_attn_with_kvcache`, and the distribution. Raises `NoRecipe`."""
    if stage.shape.mla:
        raise NoRecipe("absorbed MLA through FA3 isn't called directly here")
    provider = getattr(getattr(stage.backend, "config", None), "provider", None)
    if provider is None or provider.distribution not in _MODULES:
        who = provider.distribution if provider else "an unknown build"
        raise NoRecipe(f"{who} isn't called directly here, only {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[provider.distribution]), provider.distribution


def fa3(stage: Stage) -> Recipe:
    """`flash_attn_with_kvcache` on the page table, scheduler metadata made once where the build has it."""
    library, distribution = library_of(stage)
    shape, pool = stage.shape, stage.pool
    attend = library.flash_attn_with_kvcache
    options: dict[str, Any] = {"cache_seqlens": stage.lens, "page_table": stage.pages, "causal": True}

    longest = stage.pages.shape[1] * stage.page  # what the kernel takes a table's width for
    lens = [stage.lens, *(each.int().to(stage.device) for each in stage.host_lens[1:])]

    def plan(step: int) -> object:
        return library.get_scheduler_metadata(
            shape.requests, 1, longest, shape.num_q, shape.num_kv, shape.dim, lens[step],
            qkv_dtype=shape.dtype, page_size=stage.page, causal=True,
        )  # fmt: skip

    planned = hasattr(library, "get_scheduler_metadata")
    if planned and "scheduler_metadata" in inspect.signature(attend).parameters:
        options["scheduler_metadata"] = plan(0)
    query = stage.q[:, None]
    caches = [(pool.key_cache(i), pool.value_cache(i)) for i in range(shape.layers)]
    name, write = writer(stage)

    def call(layer: int) -> object:
        write(layer)
        return attend(query, *caches[layer], **options)

    return Recipe(f"flash_attn_with_kvcache of {distribution}", name, call, plan if planned else None)
