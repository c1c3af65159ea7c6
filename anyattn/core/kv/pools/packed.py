"""Packed pool: pages of bytes whose inside only their own library's writer knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.element_order import ElementOrder, Put, learn
from anyattn.core.kv.scales import KVScale
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["PackedFormat", "PackedPool", "Reader", "Views", "Writer"]

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Reader = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Views = Callable[[torch.Tensor, AttentionSpec, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PackedFormat:
    """A format by name: bytes of a page, and who fills and (for tests) reads it.

    `write(storage uint8 [pages, bytes], loc int64 [T], k [T, Hkv, D], v [T, Hkv, Dv])`;
    `read(storage, slots [n]) -> (k, v)` float32, or None where the library has no reader.
    `views(storage, spec, page) -> (k, v)`: the same memory typed, `[pages, ...]`, where K and V are whole
    elements of their own: kernels take those, and elements are then found without a reader.
    `kv_dtype`: what the pool's elements count as.
    """

    name: str
    page_bytes: Callable[[AttentionSpec, int], int]
    write: Writer
    read: Reader | None = None
    views: Views | None = None
    kv_dtype: torch.dtype = torch.uint8


class PackedPool(KVPool):
    """KV in a library's own format. Whole pages may be copied; single slots mean nothing outside it."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        packed: PackedFormat,
        *,
        num_slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises `PoolError` for sizes that can't be, or layers that share KV."""
        super().__init__(
            specs, num_slots=num_slots, page_size=page_size, kv_dtype=packed.kv_dtype, dtype=dtype,
            device=device,
        )  # fmt: skip
        if any(s.kv_shared_with is not None for s in self.specs):
            raise PoolError(
                "layers that share KV in a packed pool",
                asked="kv_shared_with",
                allowed="layers with KV of their own",
                hint="use the NHD or HND layout",
            )
        self.layout, self.packed = packed.name, packed
        self._one = KVScale.of(1.0, 1, self.device)
        self._storage = [
            torch.zeros(
                self.num_pages, packed.page_bytes(s, page_size), dtype=torch.uint8, device=self.device
            )
            for s in self.specs
        ]
        self._orders: dict[tuple[int, int, int], tuple[ElementOrder, ElementOrder]] = {}
        self._views = [
            None if packed.views is None else packed.views(storage, spec, page_size)
            for storage, spec in zip(self._storage, self.specs, strict=True)
        ]

    def storage(self, layer_id: int) -> torch.Tensor:
        """uint8 `[pages, bytes]`: what the library's kernels read."""
        return self._storage[self.storage_layer(layer_id)]

    def key_cache(self, layer_id: int) -> torch.Tensor:
        """K's memory as its kernels take it. Raises `PoolError` where a format has no views."""
        return self._typed(layer_id)[0]

    def value_cache(self, layer_id: int) -> torch.Tensor:
        """V's memory as its kernels take it. Raises `PoolError` where a format has no views."""
        return self._typed(layer_id)[1]

    def _typed(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._views[self.storage_layer(layer_id)]
        if found is None:
            raise PoolError(
                f"the packed format {self.layout} is bytes alone",
                asked=f"K and V of layer {layer_id}",
                allowed="storage(layer_id)",
                hint="give the format views (PackedFormat.views)",
            )
        return found

    def order(self, layer_id: int) -> tuple[ElementOrder, ElementOrder]:
        """Where K's and V's elements lie in `key_cache` and `value_cache`; learnt when first asked for.

        Raises:
            PoolError: a format without views, or one that does more than move elements about.
        """
        self._typed(layer_id)
        spec = self.specs[layer_id]
        key = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        if key not in self._orders:
            self._orders[key] = learn(self._page_writer(spec), self.page_size, *key, self.dtype)
        return self._orders[key]

    def _page_writer(self, spec: AttentionSpec) -> Put:
        """Writes whole pages of a storage of its own, behind a page that must stay as it is."""
        size = self.packed.page_bytes(spec, self.page_size)
        storage = torch.zeros(2, size, dtype=torch.uint8, device=self.device)
        loc = torch.arange(self.page_size, 2 * self.page_size, device=self.device)
        assert self.packed.views is not None
        k_view, v_view = self.packed.views(storage, spec, self.page_size)

        def put(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.packed.write(storage, loc, k.to(self.device), v.to(self.device))
            return k_view[1].cpu(), v_view[1].cpu()

        return put

    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """By the format's own writer."""
        self.packed.write(self.storage(layer_id), loc, k, v)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the format's reader, or element by element. Raises `PoolError` where there is neither."""
        if self.packed.read is None and self.packed.views is not None:
            page, row = slots // self.page_size, slots % self.page_size
            k, v = self.order(layer_id)
            return k.get(self.key_cache(layer_id), page, row), v.get(self.value_cache(layer_id), page, row)
        if self.packed.read is None:
            raise PoolError(
                f"the packed format {self.layout} has no reader",
                asked=f"KV of layer {layer_id}",
                allowed="reading through its own kernels",
                hint="keep a copy of what was written",
            )
        return self.packed.read(self.storage(layer_id), slots)

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Whole pages `source [n]` to `target [n]` in every layer."""
        for storage in self._storage:
            storage[target] = storage[source]

    def scales(self, layer_id: int) -> tuple[KVScale, KVScale]:
        """Scales are the format's own business: 1."""
        return self._one, self._one

    def nbytes(self) -> int:
        """Bytes of storage, all layers."""
        return sum(t.nbytes for t in self._storage)
