"""KV storage of any layout indexed as `[page, row]`, written apart from the pool's own layout rules."""

from __future__ import annotations

import torch

from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.element_order import ElementOrder
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.pools.packed import PackedPool
from anyattn.errors import PoolError

__all__ = ["Chunked", "Rows", "addressed", "raw_caches"]


class Chunked:
    """A 5-D cache whose rows `[n, H, D]` are found element by element.

    K `[N, H, D/x, P, x]`, or V `[N, H, P/x, D, x]` (`rows`): AITER's `pa_fwd_asm` and batch prefill.
    """

    def __init__(self, storage: torch.Tensor, *, rows: bool) -> None:
        self.storage, self.rows = storage, rows

    def _at(self, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Numbers of the elements in storage, int64 `[n, H, D]`."""
        _, heads, chunks, inner, x = self.storage.shape
        head = torch.arange(heads, device=page.device)[:, None]
        column = torch.arange(inner if self.rows else chunks * x, device=page.device)
        page, row = page[:, None, None], row[:, None, None]
        chunk, place, lane = (row // x, column, row % x) if self.rows else (column // x, row, column % x)
        return (((page * heads + head) * chunks + chunk) * inner + place) * x + lane

    def __getitem__(self, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.storage.view(-1)[self._at(*at)]

    def __setitem__(self, at: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> None:
        self.storage.view(-1)[self._at(*at)] = values


class Packed:
    """A cache in its library's own order, which its writer has shown."""

    def __init__(self, storage: torch.Tensor, order: ElementOrder) -> None:
        self.storage, self.order = storage, order

    def __getitem__(self, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.order.get(self.storage, *at)

    def __setitem__(self, at: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor) -> None:
        self.order.put(self.storage, *at, values)


Rows = torch.Tensor | Chunked | Packed
"""Indexed with `(page, row)`: rows `[n, Hkv, D]`."""


def addressed(storage: torch.Tensor, pool: KVPool, layer_id: int, *, values: bool) -> Rows:
    """A tensor laid out as the pool's keys (or `values`) of a layer, to be indexed with `(page, row)`."""
    if isinstance(pool, PackedPool):
        return Packed(storage, pool.order(layer_id)[values])
    if pool.layout == "HND":
        return storage.transpose(1, 2)
    if pool.layout == "NZ":  # K and V alike, in the order of VECTORISED_5D's K
        return Chunked(storage, rows=False)
    return Chunked(storage, rows=values) if pool.layout == "VECTORISED_5D" else storage


def raw_caches(pool: KVPool, layer_id: int = 0) -> tuple[Rows, Rows]:
    """K and V storage; index each with `(slot // P, slot % P)` to read or write rows.

    Raises:
        PoolError: a pool without public storage tensors.
    """
    if not isinstance(pool, (MHAPool, PackedPool)):
        allowed = "MHAPool, PackedPool"
        raise PoolError("no raw view of this pool", asked=type(pool).__name__, allowed=allowed)
    k, v = pool.key_cache(layer_id), pool.value_cache(layer_id)
    return addressed(k, pool, layer_id, values=False), addressed(v, pool, layer_id, values=True)
