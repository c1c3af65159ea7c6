"""`StepBuffers`: address-stable storage for everything that a step compiles to, sized once by `Limits`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from anyattn.core.plan import TableForm
from anyattn.core.spec import Limits
from anyattn.errors import BatchError

__all__ = ["StepBuffers", "Take"]

Take = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""`(name, shape, dtype) -> tensor`: how the compiler asks for storage."""


class StepBuffers:
    """Hands out views whose address depends on the name alone.

    A name is `field` or `field.group`. Each is allocated at its largest size on first use; later views
    are prefixes of the same memory, so a graph that read one keeps reading the right address.
    """

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

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of `shape` at the name's address. Raises `BatchError` beyond the limits."""
        capacity = self._capacity.get(name.split(".")[0], self._per_request)
        size = math.prod(shape)
        if size > capacity:
            raise BatchError(
                f"buffer {name!r} is too small for this step",
                asked=size,
                allowed=capacity,
                hint="raise Limits, or split the batch",
            )
        memory = self._memory.get(name)
        if memory is None:
            memory = torch.zeros(capacity, dtype=dtype, device=self._device)
            self._memory[name] = memory
        return memory[:size].view(shape)

    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.nbytes for t in self._memory.values())


def _mask_rows(limits: Limits) -> int:
    """Query tokens of a step with a mask: drafts, where the process drafts at all."""
    return limits.max_requests * limits.max_draft_tokens or limits.max_tokens
