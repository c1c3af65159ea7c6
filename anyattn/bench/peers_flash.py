"""FlashAttention-3 (`flash_attn_interface`): on pages, at its best and as two engines call it, and without.

The scheduler's metadata is made ahead wherever an engine would. `SGLang's call` and `vLLM's call` are what
their defaults on Hopper come to: SGLang's `fa3` backend runs `flash_attn_with_kvcache` on pages of 1; vLLM's
`FLASH_ATTN` (version 3) has blocks of 16, query offsets in every step, and at most 32 splits under a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, per_copy
from anyattn.bench.scene import Field, Scene

__all__ = ["SGLANG", "VLLM", "contenders"]

SGLANG = "fa3, page 1 (SGLang's call)"
VLLM = "fa3, page 16 (vLLM's call)"
_BEST_PAGE = 128
"""Of those tried, the one that its tensor-memory loads take: prefill on smaller pages copies row by row."""
_VLLM_SPLITS = 32


def contenders(cell: Cell) -> list[Contender]:
    """Everything that FA3 has for the cell."""
    found = [
        Contender(f"fa3, page {_BEST_PAGE}", "peer", partial(_paged, page=_BEST_PAGE)),
        Contender(SGLANG, "peer", partial(_paged, page=1)),
    ]
    # The number of splits is bounded under a graph alone, so the two modes are two calls.
    for mode, splits in (("graph", _VLLM_SPLITS), ("eager", 0)):
        if mode in cell.modes:
            make = partial(_paged, page=16, offsets=True, splits=splits)
            found.append(Contender(VLLM, "peer", make, modes=(mode,)))
    if cell.step == "extend" and not any(cell.prefixes) and cell.kv_dtype == cell.dtype:
        found.append(Contender("fa3, no pages", "peer", _varlen))
    return found


def _window(cell: Cell) -> tuple[int, int]:
    return (-1, -1) if cell.window is None else (cell.window - 1, 0)


def _paged(field: Field, *, page: int, offsets: bool = False, splits: int = 0) -> Entrant:
    import flash_attn_interface as fa3  # type: ignore[import-not-found,unused-ignore]

    scene, cell, q = field.paged(page), field.cell, field.q
    k, v = scene.pool.key_cache(0), scene.pool.value_cache(0)
    each = cell.news[0]
    rectangular = len(set(cell.news)) == 1 and each <= 64 and not offsets
    options: dict[str, Any] = {
        "cache_seqlens": scene.lens, "causal": True, "window_size": _window(cell), "num_splits": splits,
    }  # fmt: skip
    if rectangular:
        q = q.view(cell.batch, each, cell.num_q, cell.dim)
    else:
        options |= {"cu_seqlens_q": scene.query, "max_seqlen_q": max(cell.news)}
    if hasattr(fa3, "get_scheduler_metadata"):
        options["scheduler_metadata"] = _schedule(fa3, scene, rectangular, splits)

    narrow = cell.torch_kv_dtype.itemsize == 1

    def make(copy: int) -> Callable[[], torch.Tensor]:
        table = scene.pages[copy].contiguous()

        def run() -> torch.Tensor:
            # 8-bit K and V want 8-bit queries; models give 16 bits, and engines convert them in every layer.
            query = q.to(cell.torch_kv_dtype) if narrow else q
            out: torch.Tensor = fa3.flash_attn_with_kvcache(query, k, v, page_table=table, **options)
            return out

        return run

    return per_copy(scene, make)


def _schedule(fa3: Any, scene: Scene, rectangular: bool, splits: int) -> torch.Tensor:
    """Widths as the call has them: the kernel takes the result on trust."""
    cell = scene.cell
    options: dict[str, Any] = {} if rectangular else {"cu_seqlens_q": scene.query}
    found: torch.Tensor = fa3.get_scheduler_metadata(
        cell.batch, max(cell.news), scene.pages.shape[2] * scene.page, cell.num_q, cell.num_kv, cell.dim,
        scene.lens, qkv_dtype=cell.torch_kv_dtype, page_size=scene.page, causal=True,
        window_size=_window(cell), num_splits=splits, **options,
    )  # fmt: skip
    return found


def _varlen(field: Field) -> Entrant:
    """`flash_attn_varlen_func` on k and v as they come out of the model."""
    import flash_attn_interface as fa3

    scene, cell, q = field.paged(field.cell.page), field.cell, field.q
    longest, window = max(cell.news), _window(cell)

    def make(copy: int) -> Callable[[], torch.Tensor]:
        own = scene.own(copy)

        def run() -> torch.Tensor:
            found: Any = fa3.flash_attn_varlen_func(
                q, own.k, own.v, scene.query, scene.query, longest, longest, causal=True, window_size=window
            )
            out: torch.Tensor = found[0] if isinstance(found, tuple) else found  # builds differ
            return out

        return run

    return per_copy(scene, make)
