"""The unified pool: one space of virtual ids for the scheduler, over physical pools of their own sizes.

A virtual page is a number. What stands behind it is decided pool by pool: a page of the full pool, one in
each window pool for as long as it is seen, or nothing yet. There may be more virtual pages than physical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anyattn.core.groups import Space, TableGroup
from anyattn.core.ids import IdKind, VirtualIds
from anyattn.core.kv.pools.window import WindowPool
from anyattn.core.spec import AttentionKind, AttentionSpec
from anyattn.errors import PoolError

__all__ = ["UnifiedPool"]


class UnifiedPool(WindowPool):
    """A `WindowPool` whose full layers are behind a map too.

    Attributes:
        num_ids: usable virtual slots. num_slots: physical slots of the full pool.
    """

    ids = IdKind.VIRTUAL

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_ids: int,
        num_slots: int,
        window_slots: int | Mapping[int, int] | None = None,
        page_size: int,
        layout: str = "NHD",
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        k_scale: float | Sequence[float] = 1.0,
        v_scale: float | Sequence[float] = 1.0,
    ) -> None:
        """`window_slots` None: window layers live in the full pool.

        Raises:
            PoolError: as `WindowPool`; ids that aren't whole pages; cross-attention layers.
        """
        if num_ids < page_size or num_ids % page_size:
            raise PoolError("virtual ids must be whole pages", asked=num_ids, allowed=f"n x {page_size}")
        if any(spec.kind is AttentionKind.CROSS for spec in specs):
            raise PoolError("encoder KV behind virtual ids", asked="cross-attention layers", allowed="none")
        self.num_ids = num_ids
        super().__init__(
            specs, num_slots=num_slots, window_slots=window_slots, page_size=page_size, layout=layout,
            kv_dtype=kv_dtype, dtype=dtype, device=device, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    @property
    def listed_slots(self) -> int:
        """Virtual ids, the sink page included."""
        return self.num_ids + self.page_size

    def _sub_pools(self) -> dict[int | None, int]:
        return {None: self.num_slots} | super()._sub_pools()

    def slot_map(self, layer_id: int) -> torch.Tensor:
        """From virtual ids to a layer's own slots."""
        own = super().slot_map(layer_id)
        return self._maps[None] if own is None else own

    def table_map(self, group: TableGroup) -> torch.Tensor | None:
        """From virtual ids to a group's own slots."""
        return self._maps[None] if group.space is Space.FULL else super().table_map(group)

    def to_own(self, layer_id: int, slots: torch.Tensor | VirtualIds) -> torch.Tensor:
        """Virtual ids as physical slots of a layer's pool. What comes out is no id any more.

        Raises:
            PoolError: numbers that aren't `VirtualIds` (translated already?), ids with nothing behind them.
        """
        if not isinstance(slots, VirtualIds):
            raise PoolError(
                "physical slots where virtual ids are translated",
                asked=type(slots).__name__,
                allowed="VirtualIds",
                hint="each id is translated once; use what to_own gave as it is",
            )
        return super().to_own(layer_id, slots.values)
