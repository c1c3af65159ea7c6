"""The dual pool: full-attention layers in one pool, the layers of each window size in a smaller one.

All layers share the request table, which lists FULL slots. A window pool holds only pages that some query
can still see; `full_to_window` says where. Pages are mapped whole, so a page of consecutive slots stays one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anyattn.core.groups import CACHED_KINDS
from anyattn.core.kv.pools.base import EVICTED, UNMAPPED
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError

__all__ = ["WindowPool", "pool_name", "window_slots_for"]


def pool_name(window: int | None) -> str:
    """A sub-pool in messages."""
    return "full pool" if window is None else f"pool of window {window}"


def window_slots_for(window: int, page_size: int, max_requests: int, max_step_tokens: int) -> int:
    """Window slots that always suffice: W - 1 keys of each request, and all new tokens of a step.

    A step's own tokens are all written to the window pool and given up after it, however long the chunk:
    every key that some query of the step can see is in the pool while it runs.
    """
    kept = -(-(window - 1) // page_size) + 1  # the oldest page may be needed for its last token only
    new = -(-max_step_tokens // page_size) + max_requests  # each request's last page may be partly filled
    return (max_requests * kept + new) * page_size


class WindowPool(MHAPool):
    """An `MHAPool` whose window layers have fewer slots, numbered by a pool of their own per window size.

    `write` and `gather` take the slots of the layer's own pool (`Plan.write_loc`, `to_own`).

    Attributes:
        window_slots: usable slots by window size; a size that is absent lives in the full pool.
        sub_pools: usable slots of every pool behind a map, by window size (None: the full pool).
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        *,
        num_slots: int,
        window_slots: int | Mapping[int, int] | None,
        page_size: int,
        layout: str = "NHD",
        kv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        k_scale: float | Sequence[float] = 1.0,
        v_scale: float | Sequence[float] = 1.0,
    ) -> None:
        """`window_slots`: for every window size of the model, or by size.

        Raises:
            PoolError: no layer with a window, a size that no layer has, slots that aren't whole pages,
                KV shared between layers of different pools.
        """
        self.window_slots = {} if window_slots is None else _by_size(specs, window_slots, page_size)
        super().__init__(
            specs, num_slots=num_slots, page_size=page_size, layout=layout, kv_dtype=kv_dtype, dtype=dtype,
            device=device, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        self.sub_pools = self._sub_pools()
        pages = self.listed_slots // page_size
        self._maps = {w: self._empty_map() for w in self.sub_pools}
        self._page_of = {w: [0] * pages for w in self.sub_pools}
        self._taken: dict[int | None, set[int]] = {w: set() for w in self.sub_pools}
        self._mapped = {w: torch.zeros(pages, dtype=torch.bool, device="cpu") for w in self.sub_pools}
        self.full_to_window = {w: self._maps[w] for w in self.window_slots}

    def _sub_pools(self) -> dict[int | None, int]:
        return {window: slots for window, slots in self.window_slots.items()}  # noqa: C416

    def _empty_map(self) -> torch.Tensor:
        found = torch.full((self.listed_slots,), UNMAPPED, dtype=torch.int32, device=self.device)
        found[: self.page_size] = _rows_of(self.page_size)  # the sink is everywhere
        return found

    def _storage_pages(self, spec: AttentionSpec) -> int:
        slots = self.window_slots.get(_window(spec) or 0)
        return self.num_pages if slots is None else slots // self.page_size + 1

    def _check_shared(self, layer_id: int, spec: AttentionSpec) -> None:
        super()._check_shared(layer_id, spec)
        assert spec.kv_shared_with is not None
        pools = [_window(s) for s in (spec, self.specs[spec.kv_shared_with])]
        own, owner = (w if w in self.window_slots else None for w in pools)
        if own != owner:
            raise PoolError(
                f"layer {layer_id} shares the KV of layer {spec.kv_shared_with}, which is in another pool",
                asked=f"window {own}",
                allowed=f"window {owner}",
                hint="share between layers of one window, or create the pool without window_slots",
            )

    def map_pages(self, window: int | None, pages: Sequence[int], window_pages: Sequence[int]) -> None:
        """From now on full page `pages[i]` is page `window_pages[i]` of that window's pool.

        Raises:
            PoolError: a page out of range or in the sink, mapped already, or already somebody's.
        """
        table, taken = self._pages(window), self._taken[window]
        most = self.sub_pools[window] // self.page_size
        if len(pages) != len(window_pages):
            raise PoolError("pages to map", asked=len(window_pages), allowed=len(pages))
        for page, target in zip(pages, window_pages, strict=True):
            if not 0 < page < len(table) or table[page]:
                raise PoolError("a full page that is free of a window page", asked=page, allowed="unmapped")
            if not 0 < target <= most or target in taken:
                raise PoolError("a window page that is nobody's", asked=target, allowed=f"1..{most}, free")
            table[page] = target
            taken.add(target)
        first = torch.tensor(list(window_pages), dtype=torch.int32, device="cpu")
        self._set(window, pages, first[:, None])

    def unmap_pages(self, window: int | None, pages: Sequence[int], *, evicted: bool = False) -> list[int]:
        """Take full pages out of that window's pool; the window pages that this frees, in order.

        `evicted`: the full page lives on, its window KV is gone; a read is named so.

        Raises:
            PoolError: a page that isn't mapped.
        """
        table = self._pages(window)
        freed = [table[page] if 0 < page < len(table) else 0 for page in pages]
        if 0 in freed:
            raise PoolError(
                f"a page that is not mapped in the {pool_name(window)}",
                asked=pages[freed.index(0)],
                allowed="a mapped page",
            )
        for page, target in zip(pages, freed, strict=True):
            table[page] = 0
            self._taken[window].discard(target)
        self._set(window, pages, None, EVICTED if evicted else UNMAPPED)
        return freed

    def is_mapped(self, window: int | None, page: int) -> bool:
        """True if the full page has a page in that window's pool."""
        return self._pages(window)[page] != 0

    def to_own(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """FULL slots `[n]` in the numbering of a layer's own pool. Reads the device.

        Raises:
            PoolError: a slot that was evicted from there or never mapped.
        """
        slot_map = self.slot_map(layer_id)
        if slot_map is None:
            return slots
        own = slot_map[slots.long()].long()
        bad = (own < 0).nonzero()
        if bad.numel():
            at = int(bad[0])
            why = "was evicted" if int(own[at]) == EVICTED else "was never mapped"
            raise PoolError(f"slot {int(slots[at])} {why} in the pool of layer {layer_id}", asked="a read")
        return own

    def check_writable(self, slots: torch.Tensor) -> None:
        """Every full slot (on the host) has a slot in every window pool. Raises `PoolError`."""
        for window, mapped in self._mapped.items():
            missing = slots[~mapped[slots // self.page_size]]
            if missing.numel():
                raise PoolError(
                    f"a new token's slot has no page in the {pool_name(window)}",
                    asked=int(missing[0]),
                    allowed="slots of mapped pages",
                    hint="WindowAllocator.cover (or WindowPool.map_pages) before the step",
                )

    def _pages(self, window: int | None) -> list[int]:
        if window not in self._page_of:
            raise PoolError("window with a pool of its own", asked=window, allowed=list(self._page_of))
        return self._page_of[window]

    def _set(
        self, window: int | None, pages: Sequence[int], first: torch.Tensor | None, value: int = UNMAPPED
    ) -> None:
        index = torch.tensor(list(pages), dtype=torch.int64, device="cpu")
        self._mapped[window][index] = first is not None
        cells = torch.full((len(pages), self.page_size), value, dtype=torch.int32, device="cpu")
        if first is not None:
            cells = first * self.page_size + _rows_of(self.page_size)
        rows = self._maps[window].view(-1, self.page_size)
        rows[index.to(self.device)] = cells.to(self.device)


def _rows_of(page: int) -> torch.Tensor:
    """int32 on the host: the rows of one page."""
    return torch.arange(page, dtype=torch.int32, device="cpu")


def _window(spec: AttentionSpec) -> int | None:
    return spec.sliding_window if spec.kind in CACHED_KINDS else None


def _by_size(specs: Sequence[AttentionSpec], given: int | Mapping[int, int], page: int) -> dict[int, int]:
    sizes = {w for w in map(_window, specs) if w is not None}
    wanted = dict.fromkeys(sorted(sizes), given) if isinstance(given, int) else dict(given)
    if not wanted or set(wanted) - sizes:
        raise PoolError(
            "window pools", asked=sorted(wanted) or "none", allowed=sorted(sizes) or "no layer has a window"
        )
    for window, slots in wanted.items():
        if slots < page or slots % page:
            raise PoolError(
                f"slots of window {window} must be whole pages",
                asked=slots,
                allowed=f"a multiple of {page}",
                hint="window_slots_for(window, page_size, max_requests, max_step_tokens)",
            )
    return wanted
