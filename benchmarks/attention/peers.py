"""Peers by their own APIs, at their best: FlashInfer and FlashAttention-3. Measured against, never imported
by the package.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from anyattn.bench.harness import Candidate
from benchmarks.attention.cells import Scene

__all__ = ["decode_peers", "extend_peers"]

_WORKSPACE = 256 << 20
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


def _have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _csr(scene: Scene, copy: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's page table: offsets and last page lengths on the host, pages on the device."""
    cell = scene.cell
    pages = scene.pages[copy]
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32) * pages.shape[1]
    last = torch.full((cell.batch,), (cell.length - 1) % cell.page + 1, dtype=torch.int32)
    return indptr, pages.flatten().contiguous(), last


def _runs(scene: Scene, make: Callable[[int], Callable[[], object]]) -> list[Callable[[], object]]:
    return [make(copy) for copy in range(scene.copies)]


def decode_peers(scene: Scene) -> list[Candidate]:
    """FlashInfer with and without tensor cores, FA3 with scheduler metadata."""
    found = []
    if _have("flashinfer"):
        found.append(_flashinfer_decode(scene, tensor_cores=True))
        if scene.cell.num_q // scene.cell.num_kv in _CUDA_CORE_GROUPS:
            found.append(_flashinfer_decode(scene, tensor_cores=False))
    if _have("flash_attn_interface"):
        found.append(_fa3(scene))
    return found


def extend_peers(scene: Scene) -> list[Candidate]:
    """FA3 paged, FA3 varlen without a prefix, FlashInfer paged and ragged."""
    found = []
    if _have("flash_attn_interface"):
        found.append(_fa3(scene))
        if scene.cell.prefix == 0:
            found.append(_fa3_varlen(scene))
    if _have("flashinfer"):
        found.append(_flashinfer_paged(scene))
    return found


def _flashinfer_decode(scene: Scene, *, tensor_cores: bool) -> Candidate:
    import flashinfer  # type: ignore[import-not-found,unused-ignore]

    cell, kv = scene.cell, (scene.pool.key_cache(0), scene.pool.value_cache(0))
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=scene.device)
    out = torch.empty_like(scene.q)

    def make(copy: int) -> Callable[[], object]:
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(
            *_csr(scene, copy), cell.num_q, cell.num_kv, cell.dim, cell.page,
            q_data_type=scene.q.dtype, kv_data_type=cell.kv_dtype,
        )  # fmt: skip
        return lambda: wrapper.run(scene.q, kv, out=out)

    kind = "tensor cores" if tensor_cores else "CUDA cores"
    return Candidate(f"flashinfer {kind}", _runs(scene, make), cell.work())


def _flashinfer_paged(scene: Scene) -> Candidate:
    import flashinfer

    cell, kv = scene.cell, (scene.pool.key_cache(0), scene.pool.value_cache(0))
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=scene.device)
    out = torch.empty_like(scene.q)

    def make(copy: int) -> Callable[[], object]:
        wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        query = torch.arange(cell.batch + 1, dtype=torch.int32) * cell.new
        wrapper.plan(
            query, *_csr(scene, copy), cell.num_q, cell.num_kv, cell.dim, cell.page, causal=True,
            q_data_type=scene.q.dtype, kv_data_type=cell.kv_dtype,
        )  # fmt: skip
        return lambda: wrapper.run(scene.q, kv, out=out)

    return Candidate("flashinfer paged (fa3)", _runs(scene, make), cell.work())


def _fa3(scene: Scene) -> Candidate:
    import flash_attn_interface as fa3  # type: ignore[import-not-found,unused-ignore]

    cell = scene.cell
    k, v = scene.pool.key_cache(0), scene.pool.value_cache(0)
    lens = torch.full((cell.batch,), cell.length, dtype=torch.int32, device=scene.device)
    query = torch.arange(cell.batch + 1, dtype=torch.int32, device=scene.device) * cell.new
    decode = cell.new == 1
    q = scene.q[:, None] if decode else scene.q
    metadata = None
    if decode:
        metadata = fa3.get_scheduler_metadata(
            cell.batch, 1, cell.length, cell.num_q, cell.num_kv, cell.dim, lens, qkv_dtype=scene.q.dtype,
            page_size=cell.page, causal=True,
        )  # fmt: skip

    def make(copy: int) -> Callable[[], object]:
        table = scene.pages[copy].contiguous()
        if decode:
            return lambda: fa3.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lens, page_table=table, causal=True, scheduler_metadata=metadata
            )
        return lambda: fa3.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lens,
            page_table=table,
            causal=True,
            cu_seqlens_q=query,
            max_seqlen_q=cell.new,
        )

    return Candidate("fa3 paged", _runs(scene, make), cell.work())


def _fa3_varlen(scene: Scene) -> Candidate:
    import flash_attn_interface as fa3

    cell = scene.cell
    query = torch.arange(cell.batch + 1, dtype=torch.int32, device=scene.device) * cell.new

    def run() -> object:
        return fa3.flash_attn_varlen_func(
            scene.q, scene.k, scene.v, query, query, cell.new, cell.new, causal=True
        )

    return Candidate("fa3 varlen", [run], cell.work())
