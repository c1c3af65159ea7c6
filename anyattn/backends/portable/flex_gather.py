"""Keys of a step side by side, for layers and pools that FlexAttention's kernel can't read where they lie.

Its kernel computes offsets into the keys in 32 bits (torch 2.11 to 2.13; vllm#50427), so a longer pool
is gathered even where it has pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from anyattn.core.kv.scales import KVScale, dequantize
from anyattn.core.plan import Plan, Table

__all__ = ["REACH", "Gathered", "cells_of", "reaches"]

REACH = 1 << 31
"""Elements that the kernel's offsets reach."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """Keys of B requests side by side, `width` cells each, and one cell behind them that nobody reads.

    Attributes:
        slots: `[B * W + 1]`, 0 in cells without a key. live: bool `[B * W + 1, 1, 1]`, cells with one.
        own: cells `[n]` of this step's keys, the last cell for those that aren't among these.
        tokens: the tokens `[n]` that they are of.
    """

    width: int
    slots: torch.Tensor
    live: torch.Tensor
    own: torch.Tensor
    tokens: torch.Tensor

    def rows(
        self, stored: torch.Tensor, scale: KVScale, own: torch.Tensor | None, compute: torch.dtype
    ) -> torch.Tensor:
        """`[B, Hkv, W, D]` from what is `stored` in the slots: zero where no key stands, this step's `own`
        where they aren't stored."""
        plain = scale.is_one and stored.dtype == compute
        rows = stored if plain else dequantize(stored, scale)
        kept = rows.masked_fill(~self.live, 0.0).to(compute)
        if own is not None:
            kept[self.own] = own[self.tokens].to(compute)
        return kept[:-1].view(-1, self.width, *stored.shape[1:]).transpose(1, 2)


def cells_of(plan: Plan, table: Table, page: int, first: int, width: int, least: int) -> Gathered:
    """The slots that a table lists, `width` a request from the `first` on, and where new tokens stand there.

    `page`: of a block table. `least`: requests at least, the rest without keys.
    """
    device = table.kv_lens.device
    column = torch.arange(first, first + width, device=device, dtype=torch.int32)[None, :]
    spare = max(0, least - table.kv_lens.shape[0])
    live = column < torch.nn.functional.pad(table.kv_lens, (0, spare))[:, None]
    column = torch.where(live, column, torch.zeros_like(column))
    if table.block_table is None:
        indptr, indices = table.csr
        begin = torch.nn.functional.pad(indptr[:-1], (0, spare))[:, None]
        listed = indices[torch.where(live, begin + column, torch.zeros_like(column))]
    else:
        blocks = torch.nn.functional.pad(table.blocks, (0, 0, 0, spare))
        listed = blocks.gather(1, (column // page).long()) * page + column % page
    slots = torch.where(live, listed, torch.zeros_like(listed)).view(-1)
    slots, shown = (torch.nn.functional.pad(x, (0, 1)) for x in (slots, live.view(-1)))
    return Gathered(
        width, slots, shown[:, None, None], *_own_cells(plan, table, first, width, len(slots) - 1)
    )


def _own_cells(
    plan: Plan, table: Table, first: int, width: int, nowhere: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells `[n]` of this step's tokens in the gathered rows, and the tokens `[n]` that belong there."""
    token = torch.arange(plan.key.num_tokens, device=table.kv_lens.device)
    row = torch.searchsorted(plan.query_offsets[1:], token.int(), right=True)
    real = plan.key.num_tokens - plan.batch.num_padding_tokens
    token, row = token[:real], row[:real]
    column = plan.prefix_lens[row] - table.kv_start[row] + (token - plan.query_offsets[row]) - first
    inside = (column >= 0) & (column < width)
    return torch.where(inside, row * width + column, torch.full_like(row, nowhere)), token


def reaches(caches: Iterable[torch.Tensor]) -> bool:
    """Whether the kernel's offsets reach all of them."""
    return all(
        sum((size - 1) * step for size, step in zip(cache.shape, cache.stride(), strict=True)) < REACH
        for cache in caches
    )
