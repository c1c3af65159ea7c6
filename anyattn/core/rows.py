"""Where rows begin: kernels that load 16 bytes at a time read wrong, or fault, from any other address.

`tensor.contiguous()` doesn't say so: a slice of one row counts as contiguous wherever it begins.
"""

from __future__ import annotations

import torch

__all__ = ["WIDEST_LOAD", "aligned", "dense"]

WIDEST_LOAD = 16
"""Bytes of the widest load of a GPU thread; TMA wants the same."""


def aligned(x: torch.Tensor, nbytes: int = WIDEST_LOAD) -> torch.Tensor:
    """`x`, or a copy where a row of any of its leading axes doesn't begin at a multiple of `nbytes`."""
    unit, strides = nbytes // x.element_size(), x.stride()
    if strides[-1] != 1 or x.data_ptr() % nbytes:
        return x.clone(memory_format=torch.contiguous_format)
    for step in strides[:-1]:
        if step % unit:
            return x.clone(memory_format=torch.contiguous_format)
    return x


def dense(x: torch.Tensor, nbytes: int = WIDEST_LOAD) -> torch.Tensor:
    """`x`, or a copy where it has gaps or doesn't begin at a multiple of `nbytes`."""
    if x.is_contiguous() and x.data_ptr() % nbytes == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
