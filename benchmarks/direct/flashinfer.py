"""FlashInfer's decode and MLA wrappers: planned once from arrays on the host, run per layer."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.backends.cuda.flashinfer_plan import inner_backend, uses_tensor_cores
from benchmarks.direct.recipe import NoRecipe, Recipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["flashinfer"]

_WORKSPACE = 256 << 20


def flashinfer(stage: Stage) -> Recipe:
    """The decode wrapper with the inner kernel that the backend uses, the MLA wrapper for latents."""
    return _latent(stage) if stage.shape.mla else _dense(stage)


def _dense(stage: Stage) -> Recipe:
    """`BatchDecodeWithPagedKVCacheWrapper`."""
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


def _latent(stage: Stage) -> Recipe:
    """`BatchMLAPagedAttentionWrapper`: `MLAPlanMetadata` (0.7), or flat arrays and split tensors (0.6)."""
    from flashinfer import mla as library  # type: ignore[import-not-found,unused-ignore]

    shape, spec, method = stage.shape, stage.shape.spec(), stage.decision.decode.method
    if not method.startswith(("fa2", "fa3")):
        raise NoRecipe(f"only the planned wrapper is called directly here, not {method}")
    inner, rank = method[:3], spec.v_head_dim
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=stage.device)
    packed = hasattr(library, "MLAPlanMetadata")
    queries = torch.arange(shape.requests + 1, dtype=torch.int32)
    steps = [(queries, stage.indptr(i), stage.indices(i), n.int()) for i, n in enumerate(stage.host_lens)]
    sizes = {
        "num_heads": shape.num_q, "head_dim_ckv": rank, "head_dim_kpe": spec.head_dim - rank,
        "page_size": stage.page, "causal": False, "sm_scale": spec.scale,
        "q_data_type": shape.dtype, "kv_data_type": shape.dtype,
    }  # fmt: skip

    def wrapper() -> Any:
        return library.BatchMLAPagedAttentionWrapper(workspace, backend=inner)

    def plan(target: Any, step: int) -> None:
        if packed:
            target.plan(metadata=library.MLAPlanMetadata.csr(*steps[step]), **sizes)
        else:
            target.plan(*steps[step], **sizes)

    running, planning = wrapper(), wrapper()
    plan(running, 0)
    caches = [stage.pool.latent_cache(i)[:, :, 0] for i in range(shape.layers)]
    parts = [(cache[..., :rank], cache[..., rank:]) for cache in caches]
    split = stage.q[..., :rank], stage.q[..., rank:]
    name, write = writer(stage)

    def call(layer: int) -> object:
        write(layer)
        if packed:
            return running.run(query=stage.q, kv_cache=caches[layer])
        return running.run(*split, *parts[layer])

    return Recipe(f"MLA wrapper ({inner})", name, call, lambda step: plan(planning, step))


def _last(stage: Stage, step: int) -> torch.Tensor:
    """int32 `[B]` on the host: tokens in each last page."""
    return ((stage.host_lens[step] - 1) % stage.page + 1).int()
