"""What Hopper's extend copies by: descriptors of boxes of K and V, and of queries."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyattn.kernels.triton.descriptors import Matrix, described

__all__ = ["OUTSIDE", "key_boxes", "query_boxes"]

OUTSIDE = 1 << 30
"""A row past the end of any matrix: copies of it are zeros."""

_ROWS_OF_KEYS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_ROWS_OF_QUERIES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def key_boxes(x: Matrix, rows: int) -> TensorDescriptor:
    """Of boxes `[rows, 64]`: half a head of 128."""
    made: TensorDescriptor = described(
        TensorDescriptor, x.storage, [x.rows, x.width], [x.stride, 1], [rows, 64], layout=_ROWS_OF_KEYS
    )
    return made


def query_boxes(q: torch.Tensor, pack: int) -> TensorDescriptor | torch.Tensor | None:
    """A descriptor of half the columns of a warpgroup's 64 rows, q itself where those are no box, or None
    where its strides forbid either.
    """
    size = q.element_size()
    if q.data_ptr() % 16 or q.stride(0) * size % 16 or q.stride(1) * size % 16 or q.stride(2) != 1:
        return None
    if 64 % pack:
        return q
    made: TensorDescriptor = described(
        TensorDescriptor, q, [*q.shape], [*q.stride()], [64 // pack, pack, 64], layout=_ROWS_OF_QUERIES
    )
    return made
