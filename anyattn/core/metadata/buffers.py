"""Storage of everything that a step compiles to: its own each time, or address-stable and sized once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from anyattn.core.plan import TableForm
from anyattn.core.spec import Limits
from anyattn.errors import BatchError

__all__ = ["Field", "FreshStorage", "Packed", "StepBuffers", "StepStorage"]

Field = tuple[str, int, torch.dtype]
"""`(name, length, dtype)` of a vector."""

Packed = tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]
"""`(region, [(byte offset, vector), …])`: vectors inside one uint8 region, in the order asked for."""

_ALIGN = 16  # bytes: vectors start where kernels may load them widest
_KEPT = 4096  # views kept before all are forgotten: shapes come in buckets, but prefills have any length


class StepStorage(Protocol):
    """How the compiler asks for storage."""

    stable: bool
    """Addresses depend on names alone: shapes must then be those of the largest step, too."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Storage of one tensor."""
        ...

    def packed(self, fields: Sequence[Field]) -> Packed:
        """Storage of vectors that are filled by one copy."""
        ...


class FreshStorage:
    """New memory for every step: several plans may be alive at once."""

    stable = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def packed(self, fields: Sequence[Field]) -> Packed:
        """Vectors side by side in one allocation."""
        offsets, total = [], 0
        for _, length, dtype in fields:
            offsets.append(total)
            total += _aligned(length * dtype.itemsize)
        region = torch.empty(total, dtype=torch.uint8, device=self._device)
        typed: dict[torch.dtype, torch.Tensor] = {}
        vectors = []
        for at, (_, length, dtype) in zip(offsets, fields, strict=True):
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = region.view(dtype)
            vectors.append((at, whole.narrow(0, at // dtype.itemsize, length)))
        return region, vectors


class StepBuffers:
    """Hands out views whose address depends on the name alone.

    A name is `field` or `field.group`. Each is allocated at its largest size on first use; later views
    are prefixes of the same memory, so a graph that read one keeps reading the right address. Vectors that
    the host fills lie in one region, in the order `_ORDER`, so that one copy reaches all of them.
    """

    stable = True

    def __init__(self, limits: Limits, form: TableForm, device: torch.device) -> None:
        page = form.kernel_page
        columns = -(-limits.max_context // page)
        columns = -(-columns // form.width_multiple) * form.width_multiple
        self._device = device
        self._per_request = limits.max_requests + 1
        self._capacity = {
            "positions": limits.max_tokens,
            "out_cache_loc": limits.max_tokens,
            "encoder_out_cache_loc": limits.max_tokens,
            "mask_cells": _mask_rows(limits) * limits.max_context,
            "block_table": limits.max_requests * columns,
            "indices": limits.max_requests * columns + form.index_slack,
        }
        self._memory: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._offsets, total = {}, 0
        for name, dtype in _ORDER.items():
            self._offsets[name] = total
            total += _aligned(self._capacity.get(name, self._per_request) * dtype.itemsize)
        with torch.inference_mode(False):  # written to inside of it and outside
            self._slab = torch.zeros(total, dtype=torch.uint8, device=device)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of `shape` at the name's address. Raises `BatchError` beyond the limits."""
        found = self._views.get((name, shape))
        if found is not None and found.dtype == dtype:
            return found
        size = math.prod(shape)
        if name in self._offsets:
            return self._packed_view(name, size)
        capacity = self._check(name, size)
        memory = self._memory.get(name)
        if memory is None:
            with torch.inference_mode(False):
                memory = torch.zeros(capacity, dtype=dtype, device=self._device)
            self._memory[name] = memory
        return self._keep((name, shape), memory[:size].view(shape))

    def packed(self, fields: Sequence[Field]) -> Packed:
        """Views inside the one region that the host fills, up to the end of the last of them."""
        vectors, end = [], 0
        for name, length, dtype in fields:
            at = self._offsets[name]
            vectors.append((at, self._packed_view(name, length)))
            end = max(end, at + length * dtype.itemsize)
        region = self._views.get(("", (end,)))
        return self._keep(("", (end,)), self._slab[:end]) if region is None else region, vectors

    def _packed_view(self, name: str, length: int) -> torch.Tensor:
        view = self._views.get((name, (length,)))
        if view is None:
            self._check(name, length)
            at, dtype = self._offsets[name], _ORDER[name]
            with torch.inference_mode(False):  # a view of another dtype is of its mode
                view = self._slab[at : at + length * dtype.itemsize].view(dtype)
            self._keep((name, (length,)), view)
        return view

    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return self._slab.nbytes + sum(t.nbytes for t in self._memory.values())

    def _keep(self, key: tuple[str, tuple[int, ...]], view: torch.Tensor) -> torch.Tensor:
        if len(self._views) >= _KEPT:
            self._views.clear()
        self._views[key] = view
        return view

    def _check(self, name: str, size: int) -> int:
        capacity = self._capacity.get(name.split(".")[0], self._per_request)
        if size > capacity:
            raise BatchError(
                f"buffer {name!r} is too small for this step",
                asked=size,
                allowed=capacity,
                hint="raise Limits, or split the batch",
            )
        return capacity


_ORDER = {
    # Per request first, per token behind: a decode step's copy then ends early.
    "req_pool_indices": torch.int64,
    "seq_lens": torch.int32,
    "extend_lens": torch.int32,
    "encoder_lens": torch.int32,
    "out_cache_loc": torch.int64,
    "positions": torch.int64,
    "encoder_out_cache_loc": torch.int64,
}
"""Vectors that the host may fill, with the dtype that they are stored in."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _mask_rows(limits: Limits) -> int:
    """Query tokens of a step with a mask: drafts, where the process drafts at all."""
    return limits.max_requests * limits.max_draft_tokens or limits.max_tokens
