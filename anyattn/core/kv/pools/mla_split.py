"""Latent pool in two tensors: latents and rotated keys apart, for kernels that take no strided cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.core.kv.layouts import Axes, layout_named
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["SPLIT_LAYOUTS", "SplitMLAPool"]

SPLIT_LAYOUTS: dict[str, Axes] = {"SPLIT": Axes("nphd"), "NZ": layout_named("NZ").key}
"""SPLIT: `[pages, P, 1, size]`; NZ: `[pages, 1, size / 16, P, 16]`: what torch-npu's fused infer attention
takes latents in (documents of 2.13)."""


class SplitMLAPool(MLAPool):
    """Per layer `rank` columns of latents and `rope` columns of rotated keys, in storage of their own.

    In the model's dtype: 8-bit latents have no such kernel. New storage is zero.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_slots: int,
        page_size: int,
        layout: str = "SPLIT",
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scale: float = 1.0,
    ) -> None:
        """Raises `PoolError` for another layout, a KV dtype or scale besides the model's own values."""
        self._axes = SPLIT_LAYOUTS[layout] if layout in SPLIT_LAYOUTS else Axes("")
        self._ropes: dict[int, torch.Tensor] = {}
        if layout not in SPLIT_LAYOUTS or kv_dtype != dtype or scale != 1.0:
            raise PoolError(
                "a latent pool in two parts (layout, KV dtype, scale)",
                asked=(layout, kv_dtype, scale),
                allowed=f"{' or '.join(SPLIT_LAYOUTS)}, {dtype}, 1.0",
                hint="layout='NHD' holds latents of other dtypes and scales",
            )
        super().__init__(
            specs, num_slots=num_slots, page_size=page_size, layout=layout, kv_dtype=kv_dtype, dtype=dtype,
            device=device, scale=scale,
        )  # fmt: skip

    def _check_layout(self, layout: str) -> None:
        """Checked already."""

    def _allocate(self, layer_id: int, spec: AttentionSpec) -> None:
        for kept, size in ((self._rows, spec.v_head_dim), (self._ropes, spec.head_dim - spec.v_head_dim)):
            if not self._axes.fits(self.page_size, size, self.kv_dtype.itemsize):
                raise PoolError(f"layout {self.layout} of latents", asked=size, allowed="multiples of 16")
            shape = self._axes.shape(self.num_pages, self.page_size, 1, size, self.kv_dtype.itemsize)
            kept[layer_id] = torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def parts(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(latents, rotated keys)` in the pool's layout: what kernels read."""
        at = self.storage_layer(layer_id)
        return self._rows[at], self._ropes[at]

    def latent_cache(self, layer_id: int) -> torch.Tensor:
        """Raises `PoolError`: there is no storage that holds whole rows."""
        raise PoolError(
            f"rows of latents in a {self.layout} pool",
            asked=f"layer {layer_id} whole",
            allowed="its parts: pool.parts(layer_id)",
            hint="select(layout='NHD') for kernels that read whole rows",
        )

    def caches(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Both parts as views `[pages, P, 1, …]`; NZ has its tiles behind: `[pages, P, 1, size / 16, 16]`."""
        order = self._axes.order
        wanted = "nphd" if order == "nphd" else "nphcx"
        return tuple(part.permute([order.index(a) for a in wanted]) for part in self.parts(layer_id))

    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Store `k [T, 1, rank + rope]` at slots `loc`, its columns split. Shared KV: nothing is stored."""
        if self.specs[layer_id].kv_shared_with is not None:
            return
        rank = self.specs[layer_id].v_head_dim
        for part, columns in zip(self.parts(layer_id), (k[..., :rank], k[..., rank:]), strict=True):
            self._axes.put(part, loc, columns.to(self.kv_dtype), self.page_size)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k [n, 1, rank + rope], v [n, 1, rank])` at `slots [n]`; v is a view of k."""
        read = (self._axes.get(part, slots, self.page_size) for part in self.parts(layer_id))
        rows = torch.cat(tuple(read), dim=2)
        return rows, rows[..., : self.specs[layer_id].v_head_dim]

    def nbytes(self) -> int:
        """Bytes of storage, all layers."""
        return sum(t.nbytes for t in (*self._rows.values(), *self._ropes.values()))
