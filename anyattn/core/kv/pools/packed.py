"""Packed pool: pages of bytes whose inside only their own library's writer knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.scales import KVScale
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["PackedFormat", "PackedPool"]

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Reader = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PackedFormat:
    """A format by name: bytes of a page, and who fills and (for tests) reads it.

    `write(storage uint8 [pages, bytes], loc int64 [T], k [T, Hkv, D], v [T, Hkv, Dv])`;
    `read(storage, slots [n]) -> (k, v)` float32, or None where the library has no reader.
    """

    name: str
    page_bytes: Callable[[AttentionSpec, int], int]
    write: Writer
    read: Reader | None = None


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
            specs, num_slots=num_slots, page_size=page_size, kv_dtype=torch.uint8, dtype=dtype, device=device
        )
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

    def storage(self, layer_id: int) -> torch.Tensor:
        """uint8 `[pages, bytes]`: what the library's kernels read."""
        return self._storage[self.storage_layer(layer_id)]

    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """By the format's own writer."""
        self.packed.write(self.storage(layer_id), loc, k, v)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the format's reader. Raises `PoolError` where it has none."""
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
