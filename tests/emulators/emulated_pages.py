"""A paged world for stand-ins, and the oracle's answer for it; layouts are built here by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing import oracle


@dataclass
class Pages:
    """Requests in a shuffled pool: `keys [N, P, Hkv, D]`, `values`, `table [B, M]`."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    slots: list[list[int]]

    @property
    def page(self) -> int:
        return self.keys.shape[1]

    def expected(
        self, q: torch.Tensor, rows: list[int], *, k_scale: float = 1.0, v_scale: float = 1.0, **rules: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's (out `[T, Hq, Dv]`, LSE `[T, Hq]`), `rows` queries at the end of each request."""
        heads = self.keys.shape[2]
        flat_k = self.keys.reshape(-1, heads, self.keys.shape[3]).double() * k_scale
        flat_v = self.values.reshape(-1, heads, self.values.shape[3]).double() * v_scale
        requests = [
            oracle.OracleRequest(slots=own, num_queries=n) for own, n in zip(self.slots, rows, strict=True)
        ]
        rules.setdefault("scale", q.shape[-1] ** -0.5)
        return oracle.attend(q, flat_k, flat_v, requests, **rules)


def pages(
    lengths: list[int], *, page: int = 16, heads: int = 2, dim: int = 64, v_dim: int | None = None,
    dtype: torch.dtype = torch.float16, extra: int = 2, clean: bool = False,
) -> Pages:  # fmt: skip
    """A pool with these requests. `clean`: tails and everything else are 0 rather than NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + page)
    counts = [-(-n // page) for n in lengths]
    total = sum(counts) + 3
    order = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    width = max(counts, default=0) + extra
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    nothing = 0.0 if clean else torch.nan
    keys = torch.full((total, page, heads, dim), nothing)
    values = torch.full((total, page, heads, dim if v_dim is None else v_dim), nothing)
    slots = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own, order = order[:count], order[count:]
        table[index, :count] = torch.tensor(own, dtype=torch.int32)
        mine = [own[i // page] * page + i % page for i in range(length)]
        slots.append(mine)
        for cache in (keys, values):
            flat = cache.view(-1, heads, cache.shape[3])
            flat[mine] = torch.randn(length, heads, cache.shape[3], generator=generator)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Pages(keys.to(dtype), values.to(dtype), table, lens, slots)


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Normal values, the same each time."""
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(tokens + dim)).to(dtype)


def offsets_of(rows: list[int]) -> torch.Tensor:
    """Cumulative offsets, int32."""
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-3) -> bool:
    """Within rounding of the output's dtype."""
    return oracle.relative_error(actual.to(torch.float64), expected) <= tolerance
