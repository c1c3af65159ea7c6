"""FlashInfer's decode wrapper: planned once from arrays on the host, run per layer."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.backends.cuda.flashinfer_plan import inner_backend, uses_tensor_cores
from benchmarks.direct.recipe import NoRecipe, Recipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["flashinfer"]

_WORKSPACE = 256 << 20


def flashinfer(stage: Stage) -> Recipe:
    """`BatchDecodeWithPagedKVCacheWrapper` with the inner kernel that the backend uses."""
    if stage.shape.mla:
        raise NoRecipe("FlashInfer's MLA wrapper isn't called directly here")
    import flashinfer as library  # type: ignore[import-not-found,unused-ignore]

    shape, pool = stage.shape, stage.pool
    group = stage.layers[0].plan_group
    tensor_cores = uses_tensor_cores(group, shape.num_q, shape.dtype, pool.kv_dtype)
    inner = inner_backend(stage.decision.decode.row)
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=stage.device)

    def wrapper() -> Any:
        return library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, pool.layout, use_tensor_cores=tensor_cores, backend=inner
        )

    steps = [(stage.indptr(i), stage.indices(i), _last(stage, i)) for i in range(len(stage.batches))]

    def plan(target: Any, step: int) -> None:
        target.plan(
            *steps[step], shape.num_q, shape.num_kv, shape.dim, stage.page,
            q_data_type=shape.dtype, kv_data_type=shape.dtype,
        )  # fmt: skip

    running, planning = wrapper(), wrapper()
    plan(running, 0)
    caches = [(pool.key_cache(i), pool.value_cache(i)) for i in range(shape.layers)]
    name, write = writer(stage)

    def call(layer: int) -> object:
        write(layer)
        return running.run(stage.q, caches[layer])

    kind = "tensor cores" if tensor_cores else "CUDA cores"
    return Recipe(f"decode wrapper ({inner}, {kind})", name, call, lambda step: plan(planning, step))


def _last(stage: Stage, step: int) -> torch.Tensor:
    """int32 `[B]` on the host: tokens in each last page."""
    return ((stage.host_lens[step] - 1) % stage.page + 1).int()
