"""K and V as matrices that tensor descriptors (TMA) read boxes of, or None where their strides forbid it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from anyattn.kernels.triton.attention import Cache

__all__ = ["Matrices", "new_matrices", "pool_matrices"]

_ALIGNED = 16
"""Bytes: CUDA driver API, cuTensorMapEncodeTiled, of the address and of all strides but the last."""


@dataclass(frozen=True, eq=False)
class Matrices:
    """Descriptors of boxes `[block_n, D]` and `[block_n, Dv]`.

    `k_head`, `v_head`: elements of a row between heads. Slot s of head h of a pool lies in row
    `s // P * page_rows + s % P + h * head_rows`; of new K and V, token t is row t and `page_rows` is 0.
    """

    k: TensorDescriptor
    v: TensorDescriptor
    k_head: int
    v_head: int
    page_rows: int = 0
    head_rows: int = 0


def new_matrices(k: torch.Tensor, v: torch.Tensor, block_n: int) -> Matrices | None:
    """Of this step's `k [T, Hkv, D]` and `v [T, Hkv, Dv]`, whose heads lie in a row."""
    made = []
    for x in (k, v):
        tokens, heads, dim = x.shape
        width = (heads - 1) * x.stride(1) + dim
        if tokens == 0 or width > x.stride(0) or x.stride(2) != 1:
            return None
        made.append(_descriptor(x, tokens, width, x.stride(0), dim, block_n))
    if made[0] is None or made[1] is None:
        return None
    return Matrices(made[0], made[1], k.stride(1), v.stride(1))


def pool_matrices(cache: Cache, block_n: int) -> Matrices | None:
    """Of a layer's pages, NHD or HND."""
    made = []
    for x, (page, row, head) in ((cache.k, cache.k_strides), (cache.v, cache.v_strides)):
        dim, heads = x.shape[3], x.shape[1] * x.shape[2] // cache.page
        in_row = head < row
        if x.stride(3) != 1 or page % row or (not in_row and head % row):
            return None
        page_rows, head_rows = page // row, 0 if in_row else head // row
        rows = (x.shape[0] - 1) * page_rows + (heads - 1) * head_rows + cache.page
        width = (heads - 1) * head + dim if in_row else dim
        if width > row:
            return None
        made.append(
            (_descriptor(x, rows, width, row, dim, block_n), head if in_row else 0, page_rows, head_rows)
        )
    (k, k_head, *k_rows), (v, v_head, *v_rows) = made
    if k is None or v is None or k_rows != v_rows:
        return None
    return Matrices(k, v, k_head, v_head, *k_rows)


def _descriptor(
    x: torch.Tensor, rows: int, width: int, stride: int, dim: int, block_n: int
) -> TensorDescriptor | None:
    if x.data_ptr() % _ALIGNED or stride * x.element_size() % _ALIGNED or rows >= 1 << 31:
        return None
    return TensorDescriptor(x, [rows, width], [stride, 1], [block_n, dim])
