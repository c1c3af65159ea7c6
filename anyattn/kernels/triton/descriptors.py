"""K and V as matrices that tensor descriptors (TMA) read boxes of, or None where their strides forbid it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from anyattn.kernels.triton.attention import Cache

__all__ = ["Matrices", "Matrix", "described", "key_boxes", "new_matrices", "pool_matrices"]

_ALIGNED = 16
"""Bytes: CUDA driver API, cuTensorMapEncodeTiled, of the address and of all strides but the last."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """`rows` of `width` elements, `stride` apart, from the beginning of `storage`; heads have `dim`."""

    storage: torch.Tensor
    rows: int
    width: int
    stride: int
    dim: int

    @property
    def allowed(self) -> bool:
        """A descriptor can have this address and these strides."""
        size = self.storage.element_size()
        aligned = self.storage.data_ptr() % _ALIGNED == 0 and self.stride * size % _ALIGNED == 0
        return aligned and 0 < self.rows < 1 << 30 and self.width <= self.stride


@dataclass(frozen=True, eq=False)
class Matrices:
    """K and V of a step.

    `k_head`, `v_head`: elements of a row between heads. Slot s of head h of a pool lies in row
    `s // P * page_rows + s % P + h * head_rows`; of new K and V, token t is row t and `page_rows` is 0.
    `made`: descriptors, by kind.
    """

    k: Matrix
    v: Matrix
    k_head: int
    v_head: int
    page_rows: int = 0
    head_rows: int = 0
    made: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def paged(self) -> bool:
        """Of a pool."""
        return self.page_rows > 0

    def described(self, kind: Any, make: Callable[[Matrix], Any]) -> tuple[Any, Any]:
        """Descriptors of K and V, made once for each `kind`."""
        if kind not in self.made:
            self.made[kind] = make(self.k), make(self.v)
        return self.made[kind]


def new_matrices(k: torch.Tensor, v: torch.Tensor) -> Matrices | None:
    """Of this step's `k [T, Hkv, D]` and `v [T, Hkv, Dv]`, whose heads lie in a row."""
    first, second = _new_matrix(k), _new_matrix(v)
    if not (first.allowed and second.allowed and k.stride(2) == v.stride(2) == 1):
        return None
    return Matrices(first, second, k.stride(1), v.stride(1))


def _new_matrix(x: torch.Tensor) -> Matrix:
    tokens, heads, dim = x.shape
    return Matrix(x, tokens, (heads - 1) * x.stride(1) + dim, x.stride(0), dim)


def pool_matrices(cache: Cache) -> Matrices | None:
    """Of a layer's pages, NHD or HND."""
    first, second = _pages(cache.k, cache.k_strides, cache.page), _pages(cache.v, cache.v_strides, cache.page)
    if first is None or second is None or first[2:] != second[2:]:
        return None
    return Matrices(first[0], second[0], first[1], second[1], *first[2:])


def _pages(
    x: torch.Tensor, strides: tuple[int, int, int], page_size: int
) -> tuple[Matrix, int, int, int] | None:
    """`(matrix, elements between heads, rows of a page, rows between heads)`."""
    page, row, head = strides
    dim, heads = x.shape[3], x.shape[1] * x.shape[2] // page_size
    in_row = head < row  # NHD
    if x.stride(3) != 1 or page % row or (not in_row and head % row):
        return None
    page_rows, head_rows = page // row, 0 if in_row else head // row
    rows = (x.shape[0] - 1) * page_rows + (heads - 1) * head_rows + page_size
    matrix = Matrix(x, rows, (heads - 1) * head + dim if in_row else dim, row, dim)
    return (matrix, head if in_row else 0, page_rows, head_rows) if matrix.allowed else None


def described(
    kind: type[Any], base: torch.Tensor, shape: list[int], strides: list[int], block_shape: list[int],
    **more: Any,
) -> Any:  # fmt: skip
    """`kind(base, shape, strides, block_shape, **more)` without its checks, which take longer than a launch:
    the caller has made them (`Matrix.allowed`).
    """
    made = object.__new__(kind)
    made.__dict__.update(base=base, shape=shape, strides=strides, block_shape=block_shape, **more)
    return made


def key_boxes(x: Matrix, rows: int) -> TensorDescriptor:
    """Triton's descriptor of boxes `[rows, dim]`."""
    made: TensorDescriptor = described(
        TensorDescriptor, x.storage, [x.rows, x.width], [x.stride, 1], [rows, x.dim]
    )
    return made
