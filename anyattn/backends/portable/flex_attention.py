"""`flex_attention`: torch's FlexAttention on paged KV, read where it lies or gathered a layer at a time.

Block masks are made once a step for each plan group, from the tables; every layer of the group reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from anyattn.backends.portable.flex_blocks import Blocks, Keys, Tiles, block_lists, pages_at, tile_queries
from anyattn.backends.portable.flex_kernel import Kernel, Specialisation, block_mask, compiled
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall, step_kind
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.scales import KVScale, dequantize
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


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Keys of B requests side by side, `width` cells each.

    Attributes:
        slots: `[B * W]`, 0 in cells without a key. live: bool `[B * W, 1, 1]`, cells with one.
        own, tokens: cells `[n]` of this step's keys, and the tokens `[n]` that they are of.
    """

    width: int
    slots: torch.Tensor
    live: torch.Tensor
    own: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Group:
    """One plan group in one step; `gathered`: where its keys come from, None for paged ones."""

    blocks: Blocks
    q_block: int
    gathered: _Gathered | None


@dataclass(eq=False)
class _Step:
    """`Plan.private`: the tiles of the step, and its masks by plan group."""

    tiles: Tiles | None
    groups: dict[PlanGroup, _Group] = field(default_factory=dict)


class FlexAttention(AttentionBackend):
    """Paged where the table lists pages of at least 16 slots (NHD: storage is one long row of keys);
    gathered where it lists slots.
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
        self._paged = self._page > 1
        cpu = self.pool.device.type == "cpu"
        # Without fused kernels the scores of half-precision inputs would be rounded to it.
        self._compute = torch.float32 if cpu else config.dtype
        # One tile would make a kernel of its own, where kernels are compiled.
        self._least = 1 if cpu else 2
        self._scales: dict[tuple[PlanGroup, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._num_pages = {
            config.groups.locate(PlanGroup.of(spec)): self._pages_of(layer)
            for layer, spec in enumerate(self.pool.specs)
            if spec.kind is not AttentionKind.ENCODER_ONLY
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
        """One call of the compiled kernel; sinks are counted behind it."""
        step: _Step = call.plan.private
        if step.tiles is None:
            _no_keys(call)
            return
        group = step.groups[call.group]
        q = self._queries(call, step.tiles)
        k, v = self._keys(call, step.tiles, group)
        lengths = (q.shape[2], k.shape[2])
        mask = block_mask(group.blocks, (group.q_block, self._kv_block()), lengths)
        out, lse = self._kernel(q, k, v, call.group, group)(
            q, k, v, mask, *self._numbers(call.group, q.shape[1])
        )
        spec = call.layer.spec
        if step.tiles.pack is None:  # heads of a group are rows: already in order
            out, lse = (x.reshape(-1, spec.num_q_heads, *x.shape[3:])[: call.q.shape[0]] for x in (out, lse))
        else:
            out, lse = step.tiles.join(out.transpose(1, 2)), step.tiles.join(lse.transpose(1, 2))
        state = AttentionState(out, lse.float()).finalise(call.layer.sinks)
        call.out.copy_(state.out)
        if call.lse is not None:
            call.lse.copy_(state.lse)

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
        width, heads, q_block = 0, 1, _TILE
        if tiles.pack is None:  # its rows are the heads of a group: all in one block
            heads = self.config.groups.max_q_heads[group] // group.num_kv_heads
            q_block = _FEW if heads <= _FEW else -(-heads // _TILE) * _TILE
        prefix = plan.prefix_lens
        if table is None:  # encoder-only: the keys are the step's own, packed as its queries are
            prefix = torch.zeros_like(prefix)
            keys = Keys(prefix, plan.extend_lens, _TILE, -(-tiles.rows // _TILE))
        elif self._paged:
            pages = pages_at(table.blocks, table.kv_start, table.kv_lens, self._page, self._num_pages[group])
            width = table.blocks.shape[1]
            keys = Keys(table.kv_start, plan.seq_lens, self._page, width, table.blocks, pages)
        else:
            width = self._width(plan, group.table.window)
            keys = Keys(table.kv_start, plan.seq_lens, _TILE, -(-width // _TILE))
        blocks = block_lists(tiles, prefix, keys, kind, group.table.window, q_block, heads)
        gathered = None
        if table is not None and not self._paged:
            gathered = self._cells(plan, table, width)
        return _Group(blocks, q_block, gathered)

    @staticmethod
    def _width(plan: Plan, window: int | None) -> int:
        """Bound of the keys that a table lists for a request, in steps of 16."""
        most = plan.max_kv_len
        if window is not None:
            most = min(most, plan.max_q_len + window - 1)
        return max(1, -(-most // 16)) * 16

    def _cells(self, plan: Plan, table: Table, width: int) -> _Gathered:
        """The table's slots as `[B, W]`, and where this step's tokens stand among them."""
        indptr, indices = table.csr
        column = torch.arange(width, device=self.pool.device, dtype=torch.int32)[None, :]
        spare = (0, max(0, self._least - table.kv_lens.shape[0]))
        lens, first = (torch.nn.functional.pad(x, spare)[:, None] for x in (table.kv_lens, indptr[:-1]))
        live = column < lens
        at = torch.where(live, first + column, torch.zeros_like(column))
        slots = torch.where(live, indices[at], torch.zeros_like(indices[:1]))
        return _Gathered(width, slots.view(-1), live.view(-1, 1, 1), *self._own_cells(plan, table, width))

    def _own_cells(self, plan: Plan, table: Table, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cells `[n]` of this step's tokens in the gathered rows, and the tokens `[n]` that belong there."""
        token = torch.arange(plan.key.num_tokens, device=self.pool.device)
        row = torch.searchsorted(plan.query_offsets[1:], token.int(), right=True)
        real = plan.key.num_tokens - plan.batch.num_padding_tokens
        token, row = token[:real], row[:real]
        column = plan.prefix_lens[row] - table.kv_start[row] + (token - plan.query_offsets[row])
        return row * width + column, token

    def _pages_of(self, layer_id: int) -> int:
        pool = self.pool
        assert isinstance(pool, MHAPool)
        return pool.key_cache(layer_id).shape[0] * pool.page_size // self._page

    # -- one call ------------------------------------------------------------------------------------

    def _kv_block(self) -> int:
        return self._page if self._paged else _TILE

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan_group: PlanGroup, group: _Group
    ) -> Kernel:
        shape = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        capped, blocks = plan_group.logit_cap is not None, (group.q_block, self._kv_block())
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

    def _keys(self, call: AttentionCall, tiles: Tiles, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
        """`[1, Hkv, S, D]` views of the pool, or `[B, Hkv, W, D]` gathered."""
        pool, layer_id = self.pool, call.layer.layer_id
        assert isinstance(pool, MHAPool)
        if self._paged:
            caches = pool.key_cache(layer_id), pool.value_cache(layer_id)
            k, v = (c.view(-1, *c.shape[2:]).transpose(0, 1)[None] for c in caches)
            return k, v
        if call.table is None:
            assert call.k is not None
            assert call.v is not None
            k, v = (tiles.split(x.to(self._compute)).transpose(1, 2) for x in (call.k, call.v))
            return k, v
        cells = group.gathered
        assert cells is not None
        given = (None, None) if call.stored else (call.k, call.v)
        k, v = (
            self._gathered(stored, scale, own, cells)
            for stored, scale, own in zip(
                pool.gather(layer_id, cells.slots), pool.scales(layer_id), given, strict=True
            )
        )
        return k, v

    def _gathered(
        self, stored: torch.Tensor, scale: KVScale, own: torch.Tensor | None, cells: _Gathered
    ) -> torch.Tensor:
        """`[B, Hkv, W, D]`: zero where no key stands, this step's own where they aren't stored."""
        plain = scale.is_one and stored.dtype == self._compute
        rows = stored if plain else dequantize(stored, scale)
        kept = rows.masked_fill(~cells.live, 0.0).to(self._compute)
        if own is not None:
            kept[cells.own] = own[cells.tokens].to(self._compute)
        return kept.view(-1, cells.width, *stored.shape[1:]).transpose(1, 2)


def _no_keys(call: AttentionCall) -> None:
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(-torch.inf)
