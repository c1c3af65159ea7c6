"""Page tables of FlashInfer's wrappers: buffers that kernels read, and what the plan was made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import page_rows, token_major

__all__ = ["PageTable", "check_int32", "fill_buffer"]


def check_int32(**tensors: torch.Tensor) -> None:
    """Raises `RuntimeError` for tables that the kernels, which read int32, would misread."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise RuntimeError(f"Inconsistency of Tensor type: {name} is {tensor.dtype}, int32 is read")


def fill_buffer(buffer: torch.Tensor, source: torch.Tensor, *, head: bool = False) -> None:
    """Copy into a caller's buffer, which a graph may have seen; `head`: its first part only."""
    target = buffer[: len(source)] if head else buffer
    target.copy_(source)


@dataclass
class PageTable:
    """`indptr [B + 1]`, `indices`, `last_page_len [B]` as kernels read them when they run.

    `planned_pages`, `planned_lens`: what the schedule was made for; a kernel whose tables say otherwise
    covers other keys than it should, so that its results are NaN here.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    planned_pages: list[int]
    planned_lens: list[int]

    def keys(
        self, cache: torch.Tensor, kv_layout: str, *, by_length: bool = False
    ) -> list[torch.Tensor]:  # fmt: skip
        """Keys (or values) of each request `[m, H, D]`.

        Args:
            by_length: the schedule holds lengths, not only page counts (fa3).

        Raises:
            RuntimeError: a page outside of the pool.
        """
        paged = token_major(cache, kv_layout)
        page_size = paged.shape[1]
        found = []
        for index, span in enumerate(softmax.offsets(self.indptr)):
            pages = span[1] - span[0]
            last = int(self.last_page_len[index])
            length = (pages - 1) * page_size + last if pages else 0
            rows = page_rows(paged, self.indices, span, max(0, length)).to(torch.float64)
            stale = pages != self.planned_pages[index]
            stale |= by_length and length != self.planned_lens[index]
            stale |= pages > 0 and not 0 < last <= page_size
            found.append(torch.full_like(rows, torch.nan) if stale else rows)
        return found
