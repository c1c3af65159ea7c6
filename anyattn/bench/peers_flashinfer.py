"""FlashInfer's wrappers for dense layers, planned ahead from arrays on the host.

Decode on tensor cores and, where it has the kernel and might win, on CUDA cores; under a graph as well by its
own recipe for graphs (`use_cuda_graph`), whose grid doesn't follow lengths, beside a plan for exactly these.
Prefill on pages and on k and v as given, with the `fa3` inner kernel (`fa2` for 8-bit KV).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, per_copy
from anyattn.bench.scene import Field, Scene

__all__ = ["contenders"]

_WORKSPACE = 256 << 20
_PAGES = (16, 128)
"""Tokens of a page: both are tried, on other steps one or the other is faster."""
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
_FEW = 3
"""Query heads of a KV head that CUDA cores keep up with; with more of them, at batch 1 alone."""


def contenders(cell: Cell) -> list[Contender]:
    """Everything that FlashInfer has for the cell."""
    if cell.step != "decode":
        found = [
            Contender(f"flashinfer, paged prefill{_on(page)}", "peer", partial(_paged, page=page))
            for page in _PAGES
        ]
        if cell.step == "extend" and not any(cell.prefixes) and cell.kv_dtype == cell.dtype:
            found.append(Contender("flashinfer, ragged prefill", "peer", _ragged))
        return found
    tensor, name = partial(_decode, tensor_cores=True), "flashinfer, tensor cores"
    found = [Contender(f"{name}{_on(page)}", "peer", partial(tensor, page=page)) for page in _PAGES]
    recipe = partial(tensor, recipe=True)
    found.append(Contender(f"{name}, its graph recipe", "peer", recipe, modes=("graph",)))
    group = cell.num_q // cell.num_kv
    if group in _CUDA_CORE_GROUPS and (group <= _FEW or cell.batch == 1) and cell.kv_dtype == cell.dtype:
        found.append(Contender("flashinfer, CUDA cores", "peer", partial(_decode, tensor_cores=False)))
    return found


def _on(page: int) -> str:
    return "" if page == _PAGES[0] else f", page {page}"


def _workspace(field: Field) -> torch.Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=field.device)


def _caches(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    return scene.pool.key_cache(0), scene.pool.value_cache(0)


def _left(cell: Cell) -> int:
    """FlashInfer counts the keys left of the query."""
    return -1 if cell.window is None else cell.window - 1


def _buffers(scene: Scene, indices: torch.Tensor) -> dict[str, Any]:
    """What a wrapper in graph mode is planned into."""
    device, batch = scene.device, scene.cell.batch
    return {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(batch + 1, dtype=torch.int32, device=device),
        "paged_kv_indices_buffer": torch.zeros_like(indices),
        "paged_kv_last_page_len_buffer": torch.zeros(batch, dtype=torch.int32, device=device),
    }


def _decode(field: Field, *, tensor_cores: bool, page: int = _PAGES[0], recipe: bool = False) -> Entrant:
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    scene, cell = field.paged(page), field.cell
    kv, workspace = _caches(scene), _workspace(field)
    out = torch.empty_like(field.q)

    def make(copy: int) -> Callable[[], torch.Tensor]:
        offsets, indices, last = scene.csr(copy)
        options = _buffers(scene, indices) if recipe else {}
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores, **options
        )
        wrapper.plan(
            offsets, indices, last, cell.num_q, cell.num_kv, cell.dim, scene.page, window_left=_left(cell),
            q_data_type=cell.torch_dtype, kv_data_type=cell.torch_kv_dtype,
        )  # fmt: skip

        def run() -> torch.Tensor:
            wrapper.run(field.q, kv, out=out)
            return out

        return run

    return per_copy(scene, make)


def _paged(field: Field, *, page: int) -> Entrant:
    import flashinfer

    scene, cell = field.paged(page), field.cell
    kv, workspace, query = _caches(scene), _workspace(field), scene.query.cpu()
    inner = "fa3" if cell.kv_dtype == cell.dtype else "fa2"
    out = torch.empty_like(field.q)

    def make(copy: int) -> Callable[[], torch.Tensor]:
        wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=inner)
        wrapper.plan(
            query, *scene.csr(copy), cell.num_q, cell.num_kv, cell.dim, scene.page, causal=True,
            window_left=_left(cell), q_data_type=cell.torch_dtype, kv_data_type=cell.torch_kv_dtype,
        )  # fmt: skip

        def run() -> torch.Tensor:
            wrapper.run(field.q, kv, out=out)
            return out

        return run

    return per_copy(scene, make)


def _ragged(field: Field) -> Entrant:
    import flashinfer

    scene, cell = field.paged(field.cell.page), field.cell
    workspace, query = _workspace(field), scene.query.cpu()
    out = torch.empty_like(field.q)

    def make(copy: int) -> Callable[[], torch.Tensor]:
        own = scene.own(copy)
        wrapper: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            query, query, cell.num_q, cell.num_kv, cell.dim, causal=True, window_left=_left(cell),
            q_data_type=cell.torch_dtype, kv_data_type=cell.torch_dtype,
        )  # fmt: skip

        def run() -> torch.Tensor:
            wrapper.run(field.q, own.k, own.v, out=out)
            return out

        return run

    return per_copy(scene, make)
