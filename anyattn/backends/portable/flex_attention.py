"""`flex_attention`: torch's FlexAttention on paged KV, read where it lies or gathered a layer at a time.

Block masks are made once a step for each plan group, from the tables; every layer of the group reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from anyattn.backends.portable.flex_blocks import Blocks, Keys, Tiles, block_lists, pages_at, tile_queries
from anyattn.backends.portable.flex_gather import Gathered, cells_of, reaches
from anyattn.backends.portable.flex_kernel import Kernel, Specialisation, block_mask, compiled
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall, step_kind
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.plan import Plan, Table
from anyattn.core.spec import AttentionKind
from anyattn.core.state import AttentionState
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import PoolError

__all__ = ["FlexAttention"]

_TILE = 128
"""Query rows of a tile, and keys of a block of gathered KV: FlexAttention's own default."""
_FEW = 16
"""Rows of a block that heads of a group fill where there are no more of them."""
_PART = 16384
"""Keys of a request that a call reads at most; more take several, merged by their log-sum-exp. Sums of
131,072 keys in float32, one after the other, were off by 1.5e-5 (H200); and gathered keys take memory.
"""
_ROOM = 1 << 28
"""Elements of K that a call gathers at most, and of V. With their copies (as stored, in float32 where scaled,
without what isn't theirs) that is 2 GiB of 16-bit KV, 4 GiB of others. The kernel's offsets reach them too.
"""


_Keys = tuple[Keys, Gathered | slice | None]
"""Keys of a part, and `_Part.source`."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Some keys of each request, and where they come from: None for paged ones, columns of the tiles where
    the keys are the step's own."""

    blocks: Blocks
    source: Gathered | slice | None = None


@dataclass(frozen=True, eq=False)
class _Group:
    """One plan group in one step: a call of the kernel for each part of its keys."""

    parts: tuple[_Part, ...]
    q_block: int


@dataclass(eq=False)
class _Step:
    """`Plan.private`: the tiles of the step, and its masks by plan group."""

    tiles: Tiles | None
    groups: dict[PlanGroup, _Group] = field(default_factory=dict)


class FlexAttention(AttentionBackend):
    """Paged where the table lists pages of at least 16 slots (NHD: storage is one long row of keys);
    gathered where it lists slots, and where the kernel's offsets don't reach all of a layer's storage.
    """

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't an MHA pool."""
        super().__init__(config)
        if not isinstance(self.pool, MHAPool):
            raise PoolError(
                "flex_attention reads MHA pools",
                asked=type(self.pool).__name__,
                allowed="MHAPool",
                hint="another backend for latent layers",
            )
        self._page = config.form.kernel_page
        layers = [i for i, spec in enumerate(self.pool.specs) if spec.kind is not AttentionKind.ENCODER_ONLY]
        caches = (cache(i) for i in layers for cache in (self.pool.key_cache, self.pool.value_cache))
        self._paged = self._page > 1 and reaches(caches)
        cpu = self.pool.device.type == "cpu"
        # Without fused kernels the scores of half-precision inputs would be rounded to it.
        self._compute = torch.float32 if cpu else config.dtype
        # One tile would make a kernel of its own, where kernels are compiled.
        self._least = 1 if cpu else 2
        self._scales: dict[tuple[PlanGroup, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._num_pages = {
            config.groups.locate(PlanGroup.of(self.pool.specs[layer])): self._pages_of(layer)
            for layer in layers
        }

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables and lengths are copied while planning."""
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            kv_read=KVRead.READ_BACK,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Tiles of queries: host lengths, or none needed where each request has one token."""
        plan.private = _Step(self._tiles(plan))

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, then the block masks that follow from them."""
        super().init_forward_metadata_in_graph(plan)
        step = plan.private
        if step is None or step.tiles is None:
            return
        for group in self.config.groups.plan_groups:
            table = plan.tables.get(group.table)
            if table is not None or group.table.kind is AttentionKind.ENCODER_ONLY:
                step.groups[group] = self._masked(plan, group, step.tiles, table)

    def forward_decode(self, call: AttentionCall) -> None:
        """As `forward_extend`: tiles of one token, whose rows are the heads of a group."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """One call of the compiled kernel for each part of the keys; sinks are counted behind them."""
        step: _Step = call.plan.private
        if step.tiles is None:
            _no_keys(call)
            return
        group = step.groups[call.group]
        q = self._queries(call, step.tiles)
        states = (self._state(call, step.tiles, group.q_block, q, part) for part in group.parts)
        state = functools.reduce(AttentionState.merge, states).finalise(call.layer.sinks)
        call.out.copy_(state.out)
        if call.lse is not None:
            call.lse.copy_(state.lse)

    def _state(
        self, call: AttentionCall, tiles: Tiles, q_block: int, q: torch.Tensor, part: _Part
    ) -> AttentionState:
        """Over one part of the keys; float32 where it's one of several."""
        k, v = self._keys(call, tiles, part.source)
        mask = block_mask(part.blocks, (q_block, self._kv_block()), (q.shape[2], k.shape[2]))
        kernel = self._kernel(q, k, v, call.group, q_block)
        out, lse = kernel(q, k, v, mask, *self._numbers(call.group, q.shape[1]))
        if tiles.pack is None:  # heads of a group are rows: already in order
            heads = call.layer.spec.num_q_heads
            out, lse = (x.reshape(-1, heads, *x.shape[3:])[: call.q.shape[0]] for x in (out, lse))
        else:
            out, lse = tiles.join(out.transpose(1, 2)), tiles.join(lse.transpose(1, 2))
        single = len(call.plan.private.groups[call.group].parts) == 1
        return AttentionState(out if single else out.float(), lse.float())

    # -- planning ------------------------------------------------------------------------------------

    def _tiles(self, plan: Plan) -> Tiles | None:
        key, device = plan.key, self.pool.device
        if key.num_tokens == 0 or plan.max_q_len == 0:
            return None
        if key.mode is ForwardMode.DECODE:
            tile = torch.arange(max(self._least, key.num_requests), device=device)
            used = tile < key.num_requests
            return Tiles(1, tile * used, torch.zeros_like(tile, dtype=torch.int32), used.int())
        assert plan.host_extend_lens is not None
        # Rows in steps of 16: a length of one would make a kernel of its own.
        rows = _TILE if self._paged else -(-plan.max_q_len // 16) * 16
        return tile_queries(
            plan.host_extend_lens, key.num_tokens, rows, device, one_each=not self._paged, least=self._least
        )

    def _masked(self, plan: Plan, group: PlanGroup, tiles: Tiles, table: Table | None) -> _Group:
        kind = step_kind(group.table.kind, plan.key.mode, plan.mask_cells is not None)
        heads, q_block = 1, _TILE
        if tiles.pack is None:  # its rows are the heads of a group: all in one block
            heads = self.config.groups.max_q_heads[group] // group.num_kv_heads
            q_block = _FEW if heads <= _FEW else -(-heads // _TILE) * _TILE

        def blocks(keys: Keys) -> Blocks:
            return block_lists(tiles, prefix, keys, kind, group.table.window, q_block, heads)

        # Encoder-only keys are the step's own, whatever was before it.
        prefix = plan.prefix_lens if table is not None else torch.zeros_like(plan.prefix_lens)
        parts = self._parts(plan, group, tiles, table)
        return _Group(tuple(_Part(blocks(keys), source) for keys, source in parts), q_block)

    def _parts(self, plan: Plan, group: PlanGroup, tiles: Tiles, table: Table | None) -> Iterator[_Keys]:
        if table is None:
            return _own_parts(plan, tiles)
        found = self._paged_parts if self._paged else self._gathered_parts
        return found(plan, group, table)

    def _paged_parts(self, plan: Plan, group: PlanGroup, table: Table) -> Iterator[_Keys]:
        page, width = self._page, table.blocks.shape[1]
        pages = pages_at(table.blocks, table.kv_start, table.kv_lens, page, self._num_pages[group])
        for first in range(0, width, _PART // page):
            listed = table.blocks[:, first : first + _PART // page]
            start, end = _span(plan, table, first * page, listed.shape[1] * page)
            yield Keys(start, end, page, listed.shape[1], listed, pages), None

    def _gathered_parts(self, plan: Plan, group: PlanGroup, table: Table) -> Iterator[_Keys]:
        """Fewer keys a part where there are many requests."""
        most, window = plan.max_kv_len, group.table.window
        if window is not None:
            most = min(most, plan.max_q_len + window - 1 + (self._page - 1))  # from a page's first key
        width = max(1, -(-most // 16)) * 16
        cell = max(s.num_kv_heads * max(s.head_dim, s.v_head_dim) for s in self.pool.specs)
        requests = max(self._least, plan.key.num_requests)
        step = max(16, min(_PART, _ROOM // (requests * cell) // 16 * 16))
        for first in range(0, width, step):
            part = min(step, width - first)
            start, end = _span(plan, table, first, part)
            cells = cells_of(plan, table, self._page, first, part, self._least)
            yield Keys(start, end, _TILE, -(-part // _TILE)), cells

    def _pages_of(self, layer_id: int) -> int:
        pool = self.pool
        assert isinstance(pool, MHAPool)
        return pool.key_cache(layer_id).shape[0] * pool.page_size // self._page

    # -- one call ------------------------------------------------------------------------------------

    def _kv_block(self) -> int:
        return self._page if self._paged else _TILE

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: PlanGroup, q_block: int
    ) -> Kernel:
        shape = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        capped, blocks = group.logit_cap is not None, (q_block, self._kv_block())
        return compiled(Specialisation(shape, q.dtype, capped, self._paged, q.device.type, blocks))

    def _numbers(self, group: PlanGroup, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and cap of a group's layers, float32 `[heads of the kernel]`."""
        found = self._scales.get((group, heads))
        if found is None:
            made = (None if x is None else torch.full((heads,), x, device=self.pool.device)
                    for x in (group.scale, group.logit_cap))  # fmt: skip
            scale, cap = made
            assert scale is not None
            found = self._scales[group, heads] = (scale, cap)
        return found

    def _queries(self, call: AttentionCall, tiles: Tiles) -> torch.Tensor:
        """`[N, Hq, rows, D]`; of one token each: `[T, Hkv, G, D]`, so that a group reads its keys once."""
        q, spec = call.q.to(self._compute), call.layer.spec
        if tiles.pack is None:
            few = tiles.request.shape[0] - q.shape[0]
            q = torch.cat((q, q.new_zeros(few, *q.shape[1:]))) if few else q
            return q.view(q.shape[0], spec.num_kv_heads, spec.group_size, q.shape[2])
        return tiles.split(q).transpose(1, 2)

    def _keys(
        self, call: AttentionCall, tiles: Tiles, source: Gathered | slice | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[1, Hkv, S, D]` views of the pool, or `[B, Hkv, W, D]` gathered."""
        pool, layer_id = self.pool, call.layer.layer_id
        assert isinstance(pool, MHAPool)
        if isinstance(source, slice):
            assert call.k is not None
            assert call.v is not None
            k, v = (tiles.split(x.to(self._compute), source).transpose(1, 2) for x in (call.k, call.v))
            return k, v
        if source is None:
            caches = pool.key_cache(layer_id), pool.value_cache(layer_id)
            k, v = (c.view(-1, *c.shape[2:]).transpose(0, 1)[None] for c in caches)
            return k, v
        given = (None, None) if call.stored else (call.k, call.v)
        k, v = (
            source.rows(stored, scale, own, self._compute)
            for stored, scale, own in zip(
                pool.gather(layer_id, source.slots), pool.scales(layer_id), given, strict=True
            )
        )
        return k, v


def _own_parts(plan: Plan, tiles: Tiles) -> Iterator[_Keys]:
    """Packed as the step's queries are: one tile a request, each key in its row."""
    for first in range(0, tiles.rows, _PART):
        width = min(_PART, tiles.rows - first)
        start, end = torch.full_like(plan.extend_lens, first), plan.extend_lens.clamp_max(first + width)
        yield Keys(start, end, _TILE, -(-width // _TILE)), slice(first, first + width)


def _span(plan: Plan, table: Table, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the `first` listed key of a part, and of the end, `[B]`."""
    start = table.kv_start + first
    return start, torch.minimum(plan.seq_lens, start + width)


def _no_keys(call: AttentionCall) -> None:
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(-torch.inf)
