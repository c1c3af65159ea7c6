"""K and V of a layer stored in one launch, for vendor families on a GPU where Triton is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anyattn.backends.cuda.fused_tables import triton_launches
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.known_layer import unheld
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer

__all__ = ["FusedWriter", "FusedWrites", "offer_writer"]


class FusedWriter:
    """`MHAPool.write` as one kernel: scaled once, saturated; in any layout whose slots are rows."""

    def __init__(self, pool: MHAPool) -> None:
        from anyattn.kernels.triton import attention

        self._pool, self._kernels = pool, attention
        self._caches: dict[int, Any] = {}

    def __call__(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at slots `loc int64 [T]` of the layer's own pool."""
        cache = self._caches.get(layer_id)
        if cache is None:
            pool = self._pool
            k_scale, v_scale = pool.scales(layer_id)
            cache = self._caches[layer_id] = self._kernels.Cache.of(
                pool.key_cache(layer_id), pool.value_cache(layer_id), pool.layout,
                k_scale.device, v_scale.device, not (k_scale.is_one and v_scale.is_one),
            )  # fmt: skip
        self._kernels.kv_write(k, v, cache, loc)


def offer_writer(pool: KVPool) -> FusedWriter | None:
    """A writer for `pool`, or None where `pool.write` has to do: no Triton, or a layout without rows."""
    if not isinstance(pool, MHAPool) or pool.layout not in ("NHD", "HND") or not triton_launches(pool.device):
        return None
    return FusedWriter(pool)


class FusedWrites(AttentionBackend):
    """A vendor's family without a writer of its own: K and V in one launch, where there is a kernel for it.

    Two copies by index instead cost a layer under a graph 3 us on an H200, a third of a short decode.
    """

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._writer = offer_writer(self.pool)

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """As `AttentionBackend.write_kv`."""
        if self._writer is None or layer.spec.kv_shared_with is not None:
            super().write_kv(layer, loc, k, v)
        else:
            self._writer(layer.layer_id, loc, k, v)

    def store_of(self, layer: AttentionLayer) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        """`write_kv` of one layer, given loc, k and v; it doesn't hold this backend, which may keep it."""
        plain = getattr(self.write_kv, "__func__", None) is FusedWrites.write_kv
        if plain and self._writer is not None and layer.spec.kv_shared_with is None:
            return partial(self._writer, layer.layer_id)
        return partial(unheld(self.write_kv), layer)
