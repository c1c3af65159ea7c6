"""Latent pool: one row a token, read as K whole and as V without its rope part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.scales import KVScale, quantize
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["MLAPool"]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as uint8: not every device has indexed copies for them."""
    return x.view(torch.uint8) if is_fp8(x.dtype) else x


class MLAPool(KVPool):
    """Per layer `[pages, P, 1, rank + rope]`: the normalised latent, then the rotated key (arXiv 2405.04434).

    A latent is one head, so NHD and HND are the same bytes; views follow the name.
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
        scale: float = 1.0,
    ) -> None:
        """`scale`: initial scale of every layer (see `set_scale`). Raises `PoolError` for other layers."""
        super().__init__(
            specs, num_slots=num_slots, page_size=page_size, kv_dtype=kv_dtype, dtype=dtype, device=device
        )
        self._check_layout(layout)
        self.layout = layout
        self._rows: dict[int, torch.Tensor] = {}
        self._scales: dict[int, KVScale] = {}
        for layer_id, spec in enumerate(self.specs):
            _check_latent(layer_id, spec, self.specs)
            if spec.kv_shared_with is None:
                self._allocate(layer_id, spec)
                self.set_scale(layer_id, scale)

    def _check_layout(self, layout: str) -> None:
        if layout not in ("NHD", "HND"):
            raise PoolError("KV layout of a latent pool", asked=layout, allowed="NHD, HND")

    def _allocate(self, layer_id: int, spec: AttentionSpec) -> None:
        shape = (self.num_pages, self.page_size, 1, spec.head_dim)
        self._rows[layer_id] = torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def set_scale(self, layer_id: int, scale: float) -> None:
        """The one scale of a layer's latents and rope parts; before anything is written to it."""
        self._scales[self.storage_layer(layer_id)] = KVScale.of(scale, 1, self.device)

    def scales(self, layer_id: int) -> tuple[KVScale, KVScale]:
        """`(k_scale, v_scale)`: the same, since V is a part of K."""
        scale = self._scales[self.storage_layer(layer_id)]
        return scale, scale

    def latent_cache(self, layer_id: int) -> torch.Tensor:
        """Storage `[pages, P, 1, rank + rope]`."""
        return self._rows[self.storage_layer(layer_id)]

    def key_cache(self, layer_id: int) -> torch.Tensor:
        """Storage as K of the layout: `[pages, P, 1, rank + rope]`, or `[pages, 1, P, …]` for HND."""
        rows = self.latent_cache(layer_id)
        return rows if self.layout == "NHD" else rows.transpose(1, 2)

    def value_cache(self, layer_id: int) -> torch.Tensor:
        """The first `rank` columns of `key_cache`, a view."""
        return self.key_cache(layer_id)[..., : self.specs[layer_id].v_head_dim]

    def caches(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """The latents; V is a part of them."""
        return (self.latent_cache(layer_id),)

    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Store `k [T, 1, rank + rope]` at slots `loc`; v is a part of it and isn't looked at.

        A layer with shared KV stores nothing.
        """
        if self.specs[layer_id].kv_shared_with is not None:
            return
        cache = _bytes(self._rows[layer_id])
        stored = _bytes(quantize(k, self._scales[layer_id], self.kv_dtype))
        cache.view(-1, *cache.shape[2:]).index_copy_(0, loc, stored)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k [n, 1, rank + rope], v [n, 1, rank])` at `slots [n]`, as stored; v is a view of k."""
        raw = _bytes(self.latent_cache(layer_id))
        rows = raw.view(-1, *raw.shape[2:]).index_select(0, slots).view(self.kv_dtype)
        return rows, rows[..., : self.specs[layer_id].v_head_dim]

    def nbytes(self) -> int:
        """Bytes of storage, all layers."""
        return sum(t.nbytes for t in self._rows.values())


def _check_latent(layer_id: int, spec: AttentionSpec, specs: Sequence[AttentionSpec]) -> None:
    """A latent layer, whose storage is its own or another's of the same shape."""
    mla = spec.mla
    shape = (spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    want = None if mla is None else (1, mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank)
    if shape != want:
        raise PoolError(
            f"layer {layer_id} isn't a latent layer as the pool stores them (Hkv, D, Dv)",
            asked=shape,
            allowed="(1, rank + rope, rank) of an MLASpec" if want is None else want,
            hint="AttentionSpec(num_kv_heads=1, head_dim=rank + rope, v_head_dim=rank, mla=MLASpec(…))",
        )
    owner = spec.kv_shared_with
    if owner is None:
        return
    if not 0 <= owner < len(specs) or specs[owner].kv_shared_with is not None or specs[owner].mla != mla:
        raise PoolError(
            f"layer {layer_id} shares the latents of layer {owner}",
            asked=owner,
            allowed="a layer with storage of its own and the same MLASpec",
        )
