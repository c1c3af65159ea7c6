"""Absorbed MLA decode by FlashMLA and by FlashInfer's MLA wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, NotHere, per_copy
from anyattn.bench.scene import Field

__all__ = ["flashinfer", "flashmla"]

_WORKSPACE = 256 << 20
_PAGE = 64


def flashmla(cell: Cell) -> list[Contender]:
    """`flash_mla_with_kvcache` on pages of 64."""
    return [Contender("FlashMLA", "peer", _flashmla)] if cell.step == "decode" else []


def flashinfer(cell: Cell) -> list[Contender]:
    """`BatchMLAPagedAttentionWrapper` with each inner kernel."""
    if cell.step != "decode":
        return []
    return [Contender(f"FlashInfer MLA, {i}", "peer", partial(_wrapper, inner=i)) for i in ("fa3", "fa2")]


def _flashmla(field: Field) -> Entrant:
    import flash_mla as library  # type: ignore[import-not-found,unused-ignore]

    scene, cell = field.paged(_PAGE), field.cell
    attend = library.flash_mla_with_kvcache
    cache = scene.pool.latent_cache(0)
    # The first call fills the schedule from the lengths, which all copies share.
    metadata, splits = library.get_mla_metadata()
    options: dict[str, Any] = {
        "head_dim_v": cell.v_dim, "tile_scheduler_metadata": metadata, "num_splits": splits,
        "softmax_scale": cell.spec().scale, "causal": False,
    }  # fmt: skip
    if "use_legacy" in inspect.signature(attend).parameters:
        options["use_legacy"] = True
    query = field.q[:, None]

    def make(copy: int) -> Callable[[], torch.Tensor]:
        table = scene.pages[copy].contiguous()

        def run() -> torch.Tensor:
            out: torch.Tensor = attend(query, cache, block_table=table, cache_seqlens=scene.lens, **options)[
                0
            ]
            return out

        return run

    return per_copy(scene, make)


def _wrapper(field: Field, *, inner: str) -> Entrant:
    from flashinfer import mla as library  # type: ignore[import-not-found,unused-ignore]

    if not hasattr(library, "MLAPlanMetadata"):
        raise NotHere("FlashInfer before 0.7 isn't called directly here")
    scene, cell = field.paged(_PAGE), field.cell
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=field.device)
    cache = scene.pool.latent_cache(0)[:, :, 0]
    queries = torch.arange(cell.batch + 1, dtype=torch.int32)
    lens = torch.tensor(cell.lengths, dtype=torch.int32)

    def make(copy: int) -> Callable[[], torch.Tensor]:
        offsets, indices, _ = scene.csr(copy)
        wrapper: Any = library.BatchMLAPagedAttentionWrapper(workspace, backend=inner)
        wrapper.plan(
            metadata=library.MLAPlanMetadata.csr(queries, offsets, indices, lens), num_heads=cell.num_q,
            head_dim_ckv=cell.v_dim, head_dim_kpe=cell.dim - cell.v_dim, page_size=scene.page, causal=False,
            sm_scale=cell.spec().scale, q_data_type=cell.torch_dtype, kv_data_type=cell.torch_kv_dtype,
        )  # fmt: skip

        def run() -> torch.Tensor:
            out: torch.Tensor = wrapper.run(query=field.q, kv_cache=cache)
            return out

        return run

    return per_copy(scene, make)
