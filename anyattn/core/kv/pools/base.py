"""What every KV pool offers: writing a step's KV, views for kernels, reading back for tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from anyattn.core.groups import CACHED_KINDS, Space, TableGroup
from anyattn.core.ids import IdKind
from anyattn.core.kv.scales import KVScale
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["EVICTED", "UNMAPPED", "KVPool"]

UNMAPPED, EVICTED = -1, -2
"""Entries of `full_to_window` without a window slot: none was given yet, or it was taken back."""


class KVPool(ABC):
    """Paged KV of all layers of a model.

    A page is `page_size` consecutive slots. Page 0 is the sink of padded writes and belongs to nobody;
    usable slots are `page_size .. page_size + num_slots - 1`.

    Attributes:
        num_slots: usable slots. page_size: tokens a page holds. layout: `NHD`, `HND`, …
        kv_dtype: stored dtype. dtype: model dtype. device: where it lives.
        full_to_window: for each window size whose layers have slots of their own, int32 `[S]` on the device:
            the window slot of each slot, UNMAPPED or EVICTED where there is none.
    """

    layout: str
    ids: IdKind = IdKind.PHYSICAL
    """What request tables and batches list for this pool."""
    full_to_window: Mapping[int, torch.Tensor] = MappingProxyType({})

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_slots: int,
        page_size: int,
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Raises `PoolError` for sizes that can't be."""
        if page_size < 1 or num_slots < page_size or num_slots % page_size:
            raise PoolError(
                "num_slots must be whole pages",
                asked=f"{num_slots} slots of pages of {page_size}",
                allowed=f"a multiple of {page_size}, at least one page",
                hint=f"num_slots={max(1, -(-num_slots // max(1, page_size))) * max(1, page_size)}",
            )
        self.specs = tuple(specs)
        self.num_slots, self.page_size = num_slots, page_size
        self.num_pages = num_slots // page_size + 1
        self.kv_dtype, self.dtype = kv_dtype, dtype
        self.device = torch.device(device)

    @property
    def total_slots(self) -> int:
        """Slots of the storage, the sink page included: slot numbers are below this."""
        return self.num_pages * self.page_size

    @property
    def listed_slots(self) -> int:
        """Numbers that request tables may list are below this."""
        return self.total_slots

    def storage_layer(self, layer_id: int) -> int:
        """The layer whose storage `layer_id` uses (KV sharing). Raises `PoolError` if out of range."""
        if not 0 <= layer_id < len(self.specs):
            raise PoolError(
                "layer_id",
                asked=layer_id,
                allowed=f"0..{len(self.specs) - 1}",
                hint="list every layer's AttentionSpec in select()",
            )
        shared = self.specs[layer_id].kv_shared_with
        return layer_id if shared is None else shared

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        """The map that leads from the request table's slots to the layer's own; None = they are the same."""
        spec = self.specs[self.storage_layer(layer_id)]
        if spec.sliding_window is None or spec.kind not in CACHED_KINDS:
            return None
        return self.full_to_window.get(spec.sliding_window)

    def table_map(self, group: TableGroup) -> torch.Tensor | None:
        """As `slot_map`, for the layers of a table group."""
        if group.space is not Space.WINDOW:
            return None
        assert group.window is not None
        return self.full_to_window[group.window]

    def check_writable(self, slots: torch.Tensor) -> None:  # noqa: B027
        """Tokens may be written to these slots (on the host). Raises `PoolError`; default: all may."""

    @abstractmethod
    def write(self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at slots `loc int64 [T]`, scaled and saturated once."""

    @abstractmethod
    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k [n, Hkv, D], v [n, Hkv, Dv])` at `slots [n]`, as stored (no scale applied)."""

    def caches(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Storage of a layer as views `[pages, P, ...]`, each byte once.

        Raises:
            PoolError: a layout whose slots aren't addressable.
        """
        raise PoolError(
            "the slots of this pool can't be moved",
            asked=f"{type(self).__name__} ({self.layout})",
            allowed="a pool with one row of storage per slot",
            hint="verify chains only, or use the NHD or HND layout",
        )

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the KV of slots `source [n]` to slots `target [n]` in every layer, bit for bit.

        All is read before anything is written, so the two may overlap. Targets are distinct, but for
        slot 0. Slots are those of the request table; int64 on the pool's device; no host sync.
        """
        for layer_id, spec in enumerate(self.specs):
            if spec.kv_shared_with is not None:
                continue
            slot_map = self.slot_map(layer_id)
            read, write = (
                s if slot_map is None else slot_map[s].long().clamp_min(0) for s in (source, target)
            )
            for cache in self.caches(layer_id):
                raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
                kept = raw[read // self.page_size, read % self.page_size]
                raw[write // self.page_size, write % self.page_size] = kept

    @abstractmethod
    def scales(self, layer_id: int) -> tuple[KVScale, KVScale]:
        """`(k_scale, v_scale)` of a layer."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of storage, all layers."""
