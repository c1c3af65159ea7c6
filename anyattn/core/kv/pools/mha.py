"""MHA / GQA / MQA pool in every layout that slots can be addressed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.layouts import LAYOUTS, Axes, layout_named
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.scales import KVScale, quantize
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["LAYOUTS", "MHAPool"]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8: not every device has indexed copies for them."""
    return x.view(torch.uint8) if is_fp8(x.dtype) else x


class MHAPool(KVPool):
    """K and V of each layer as one tensor each.

    NHD: `[pages, P, Hkv, D]`; HND: `[pages, Hkv, P, D]`; vendor layouts: see `core.kv.layouts`.
    New storage is zero, so the unused tail of a page is finite until somebody writes to it.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_slots: int,
        page_size: int,
        layout: str = "NHD",
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        k_scale: float | Sequence[float] = 1.0,
        v_scale: float | Sequence[float] = 1.0,
    ) -> None:
        """`k_scale`, `v_scale`: initial scales of every layer (see `set_scales`)."""
        super().__init__(
            specs, num_slots=num_slots, page_size=page_size, kv_dtype=kv_dtype, dtype=dtype, device=device
        )
        self.layout, self._axes = layout, layout_named(layout)
        self._k: dict[int, torch.Tensor] = {}
        self._v: dict[int, torch.Tensor] = {}
        self._scales: dict[int, tuple[KVScale, KVScale]] = {}
        for layer_id, spec in enumerate(self.specs):
            if spec.kv_shared_with is not None:
                self._check_shared(layer_id, spec)
                continue
            pages = self._storage_pages(spec)
            self._k[layer_id] = self._allocate(self._axes.key, pages, spec.num_kv_heads, spec.head_dim)
            self._v[layer_id] = self._allocate(self._axes.value, pages, spec.num_kv_heads, spec.v_head_dim)
            self.set_scales(layer_id, k_scale, v_scale)

    def _storage_pages(self, spec: AttentionSpec) -> int:
        """Pages of a layer's storage, the sink included."""
        return self.num_pages

    def _allocate(self, axes: Axes, pages: int, heads: int, dim: int) -> torch.Tensor:
        itemsize = self.kv_dtype.itemsize
        if not axes.fits(self.page_size, dim, itemsize):
            raise PoolError(
                f"layout {self.layout} splits pages and heads into whole chunks",
                asked=f"page {self.page_size}, head size {dim}, {itemsize} bytes an element",
                allowed=f"multiples of {axes.inner or 16 // itemsize}",
                hint="another page size, or layout='NHD'",
            )
        shape = axes.shape(pages, self.page_size, heads, dim, itemsize)
        return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def _check_shared(self, layer_id: int, spec: AttentionSpec) -> None:
        owner = spec.kv_shared_with
        assert owner is not None
        same = 0 <= owner < len(self.specs) and self.specs[owner].kv_shared_with is None
        if same:
            other = self.specs[owner]
            same = (other.num_kv_heads, other.head_dim, other.v_head_dim) == (
                spec.num_kv_heads,
                spec.head_dim,
                spec.v_head_dim,
            )
        if not same:
            raise PoolError(
                f"layer {layer_id} shares the KV of layer {owner}",
                asked=owner,
                allowed="a layer with storage of its own and the same KV shape",
            )

    def set_scales(
        self, layer_id: int, k_scale: float | Sequence[float], v_scale: float | Sequence[float]
    ) -> None:
        """Scales of one layer, per tensor or per KV head; before anything is written to it."""
        heads = self.specs[layer_id].num_kv_heads
        self._scales[self.storage_layer(layer_id)] = KVScale.pair(k_scale, v_scale, heads, self.device)

    def scales(self, layer_id: int) -> tuple[KVScale, KVScale]:
        """`(k_scale, v_scale)` of a layer."""
        return self._scales[self.storage_layer(layer_id)]

    def key_cache(self, layer_id: int) -> torch.Tensor:
        """K storage in the pool's layout: what kernels read."""
        return self._k[self.storage_layer(layer_id)]

    def value_cache(self, layer_id: int) -> torch.Tensor:
        """V storage in the pool's layout."""
        return self._v[self.storage_layer(layer_id)]

    def caches(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """K and V as `[pages, P, Hkv, size]` views. Raises `PoolError` for layouts that split rows."""
        if not self._axes.token_rows:
            return super().caches(layer_id)
        stored = self.key_cache(layer_id), self.value_cache(layer_id)
        return stored if self.layout == "NHD" else tuple(c.transpose(1, 2) for c in stored)

    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at slots `loc`. A layer with shared KV stores nothing."""
        if self.specs[layer_id].kv_shared_with is not None:
            return
        k_scale, v_scale = self.scales(layer_id)
        axes = self._axes
        for cache, x, scale, order in (
            (self._k[layer_id], k, k_scale, axes.key),
            (self._v[layer_id], v, v_scale, axes.value),
        ):
            order.put(_bytes(cache), loc, _bytes(quantize(x, scale, self.kv_dtype)), self.page_size)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k [n, Hkv, D], v [n, Hkv, Dv])` at `slots [n]`, as stored."""
        k = self._axes.key.get(_bytes(self.key_cache(layer_id)), slots, self.page_size)
        v = self._axes.value.get(_bytes(self.value_cache(layer_id)), slots, self.page_size)
        return k.view(self.kv_dtype), v.view(self.kv_dtype)

    def nbytes(self) -> int:
        """Bytes of storage, all layers."""
        return sum(t.nbytes for t in (*self._k.values(), *self._v.values()))
