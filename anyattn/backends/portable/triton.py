"""`triton`: our portable kernels on any GPU that Triton compiles for; the interpreter runs them on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from anyattn.backends.portable.triton_repeats import DecodeRepeats
from anyattn.backends.portable.triton_verify import few_step, verify_step
from anyattn.core.batch import Exact, ForwardBatch, ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup, Space
from anyattn.core.known_layer import PlainCall, unheld
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.metadata.extent import max_kv_len
from anyattn.core.plan import Plan
from anyattn.core.spec import AttentionKind
from anyattn.core.strategy import Strategy, choose_strategy
from anyattn.core.traits import Determinism, KVRead, SharedReadEnds, Traits
from anyattn.errors import PoolError
from anyattn.kernels.triton import attention as kernels
from anyattn.kernels.triton.configs import Decode, Extend, choose_decode, choose_extend
from anyattn.kernels.triton.configs.choose import kernel_arch, num_units, power_of_two
from anyattn.kernels.triton.decode_launch import DecodeStep, decode, pieces
from anyattn.kernels.triton.extend_launch import ExtendStep, extend
from anyattn.kernels.triton.metadata_launch import compile_by_kernels
from anyattn.kernels.triton.verify_launch import VerifyStep, fill_verify, verify

__all__ = ["TritonAttention"]

_ANY_ROWS = 1 << 20
_EVEN = 0.9  # of the longest, on average


@dataclass(eq=False)
class _Step:
    """`Plan.private`: per plan group, what all of its layers share."""

    pool: KVPool
    decode: dict[PlanGroup, DecodeStep] = field(default_factory=dict)
    extend: dict[PlanGroup, Extend] = field(default_factory=dict)
    verify: dict[PlanGroup, VerifyStep] = field(default_factory=dict)
    """Instead of extend, where layers have these heads; of requests with few tokens alone, or of all."""
    fresh: bool = False
    """No request has cached tokens: k and v, which lie together, are all keys."""
    suits: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """For what lengths decode's tiles are chosen or aren't (`TritonAttention.renews`)."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """What the kernels need of one layer, the same in every step."""

    layer: AttentionLayer
    cache: kernels.Cache
    heads: kernels.Heads
    causal: kernels.Variant
    other: kernels.Variant
    """For the steps in which the layer isn't causal."""


class TritonAttention(AttentionBackend):
    """Split-KV decode and variable-length extend straight from `req_to_token` (REQUEST_TABLE).

    Batch-invariant on request: then every row runs in one pass of the extend kernel over the pool, with one
    tile for all shapes, anchored at position 0: what a row sums, and in which order, depends on its own
    keys alone.
    """

    translates_reads = True

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD or HND."""
        self._invariant = config.deterministic is Determinism.BATCH_INVARIANT
        super().__init__(config)
        if not isinstance(self.pool, MHAPool):
            raise PoolError("triton reads MHA pools", asked=type(self.pool).__name__, allowed="MHAPool")
        compile_by_kernels(self.compiler, self.table, _dealt)
        self._layers: dict[int, _Layer] = {}
        self._heads = {
            group: kernels.Heads(num_q, group.num_kv_heads, group.head_dim, group.v_head_dim)
            for group, num_q in config.groups.max_q_heads.items()
        }
        self._arch, self._units = kernel_arch(self.pool.device), num_units(self.pool.device)
        self._asked: tuple[int, int, tuple[int, ...]] = 0, 0, ()
        """Of the last batch: see `renews`."""
        self._chosen: dict[tuple[int, kernels.Heads, int, bool, bool, int, torch.dtype], Decode] = {}

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the live request table; new tokens are attended to as given, except in decode."""
        base = super().traits(mode)
        read_back = self._invariant or mode is ForwardMode.DECODE
        return Traits(
            host_lengths=base.host_lengths,
            shared_read_ends=SharedReadEnds.POST_REPLAY,
            graph=base.graph,
            determinism=base.determinism,
            kv_read=KVRead.READ_BACK if read_back else KVRead.DIRECT,
            tolerates_nan_tail=base.tolerates_nan_tail,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Tiles, ranges and workspace: functions of shapes and bounds, never of device values."""
        step = _Step(self.pool, fresh=self._all_new(plan, in_capture))
        itemsize = self._itemsize()
        for group, heads in self._heads.items():
            dim = max(heads.dim, heads.v_dim)
            if self._invariant:
                step.extend[group] = choose_extend(_ANY_ROWS, dim, itemsize, self._arch)
                continue
            if plan.key.mode is ForwardMode.DECODE and group.table.kind is not AttentionKind.ENCODER_ONLY:
                step.decode[group] = self._decode_step(plan, group, heads, in_capture)
            rows = max(1, plan.max_q_len) * heads.group
            step.extend[group] = choose_extend(power_of_two(rows), dim, itemsize, self._arch)
            few = None if step.fresh else self._verify_step(plan, group, heads, in_capture)
            if few is not None:
                step.verify[group] = few
        plan.private = step

    def _verify_step(
        self, plan: Plan, group: PlanGroup, heads: kernels.Heads, in_capture: bool
    ) -> VerifyStep | None:
        if plan.key.mode is ForwardMode.DECODE:
            return None
        given: dict[str, Any] = {
            "itemsize": self._itemsize(), "kv_itemsize": self.pool.kv_dtype.itemsize, "arch": self._arch,
            "units": self._units,
        }  # fmt: skip
        place = self.table.req_to_token, self.config.form.kernel_page
        even = _even(plan.batch, group, in_capture)
        made = verify_step(plan, group, heads, *place, even=even, **given)
        return made or few_step(plan, group, heads, *place, **given)

    def _decode_step(
        self, plan: Plan, group: PlanGroup, heads: kernels.Heads, in_capture: bool
    ) -> DecodeStep:
        table, run = plan.tables[group.table], self.config.form.kernel_page
        source, window = self.table.req_to_token, group.table.window
        if group.table.space is Space.ENCODER:
            assert self.table.encoder_to_token is not None
            source, window = self.table.encoder_to_token, None
        tiles = self._tiles(plan.batch, plan.max_kv_len, group, heads, in_capture)
        return DecodeStep.of(
            source, plan.req_pool_indices, table.kv_start, table.kv_lens, window, run, heads, tiles
        )

    def _tiles(
        self, batch: ForwardBatch, longest: int, group: PlanGroup, heads: kernels.Heads, in_capture: bool
    ) -> Decode:
        """Those for requests of up to `longest` tokens; the same object for the same choice."""
        run, window, bound = self.config.form.kernel_page, group.table.window, longest
        if group.table.space is Space.ENCODER:
            assert self.table.encoder_to_token is not None
            bound = self.table.encoder_to_token.shape[1]
        elif window is not None:
            bound = min(bound, window + run)  # a trimmed table begins at a page
        requests, bound = max(1, batch.batch_size), power_of_two(bound)
        dim = max(heads.dim, heads.v_dim)
        far = self.pool.num_pages * self.pool.page_size * heads.num_kv * dim >= 1 << 31
        even = not far and _even(batch, group, in_capture)
        known = (requests, heads, bound, even, far, run, self.pool.kv_dtype)
        tiles = self._chosen.get(known)
        if tiles is None:
            tiles = self._chosen[known] = choose_decode(
                requests, kernels.decode_programs(heads), bound, dim, self._itemsize(),
                self._arch, self._units, heads=heads.block, kv_itemsize=self.pool.kv_dtype.itemsize,
                even=even, scattered=far or run == 1, run=run,
            )  # fmt: skip
        return tiles

    def _itemsize(self) -> int:
        return max(self.pool.dtype.itemsize, self.pool.kv_dtype.itemsize)

    def renews(self, plan: Plan, batch: ForwardBatch) -> bool:
        """Where the same tiles are chosen for it, of the same pool and request table."""
        step: _Step = plan.private
        source = self.table.req_to_token
        if step.pool is not self.pool:
            return False
        for each in step.decode.values():
            if each.source is not source:
                return False
        # A batch is asked about once for each plan that is kept: it is frozen, and so is what it is asked.
        serial, longest, lengths = self._asked
        if serial != batch.serial:
            longest = max_kv_len(batch, self.table.max_context)
            # All that `_tiles` looks at in a batch of the same shape.
            lengths = (
                power_of_two(longest),
                *[_even(batch, group, in_capture=False) for group in self._heads],
            )
            self._asked = batch.serial, longest, lengths
        suits = step.suits.get(lengths)
        if suits is None:
            suits = step.suits[lengths] = all(
                self._tiles(batch, longest, group, each.heads, in_capture=False) is each.tiles
                for group, each in step.decode.items()
            )
        return suits

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:  # anyattn: in-graph
        """Tables and how decode deals them out, then how verification does."""
        super().init_forward_metadata_in_graph(plan)
        if isinstance(plan.private, _Step):
            for few in plan.private.verify.values():
                fill_verify(few)

    def _all_new(self, plan: Plan, in_capture: bool) -> bool:
        if self._invariant or in_capture or plan.key.mode is not ForwardMode.EXTEND:
            return False
        return choose_strategy(plan.batch, (Strategy.PAGED, Strategy.RAGGED)) is Strategy.RAGGED

    def replan(self, plan: Plan) -> None:
        """Nothing: tiles and splits are a graph's own, and lengths are read on the device."""

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """One launch for K and V. A layer with shared KV stores nothing."""
        if layer.spec.kv_shared_with is None:
            kernels.kv_write(k, v, self._layer(layer).cache, loc)

    def at_once(self, layer: AttentionLayer, mode: ForwardMode, group: PlanGroup) -> PlainCall | None:
        """Decode repeats its launches, unless rows are batch-invariant (extends then)."""
        if mode is not ForwardMode.DECODE or self._invariant or layer.spec.kv_shared_with is not None:
            return None
        own, stores = self._layer(layer), getattr(self.write_kv, "__func__", None)
        store = None if stores is TritonAttention.write_kv else partial(unheld(self.write_kv), layer)
        return DecodeRepeats(own.cache, own.heads, own.causal, group, self._dtype, store)

    def forward_decode(self, call: AttentionCall) -> None:  # anyattn: in-graph
        """Split-KV decode over everything in the pool."""
        if self._invariant or not call.stored or call.table is None:
            self.forward_extend(call)
            return
        own, step, work = self._layer(call.layer), call.plan.private.decode[call.group], None
        if own.heads.num_q != step.heads.num_q:
            work = pieces(call.q.shape[0], own.heads, step.tiles, call.q.device)
        decode(call.q, own.cache, step, own.heads, own.causal, call.out, call.lse, work)

    def forward_extend(self, call: AttentionCall) -> None:  # anyattn: in-graph
        """Cached keys through the table, this step's own from k and v where they were given."""
        plan, table, own = call.plan, call.table, self._layer(call.layer)
        cross = call.layer.spec.kind is AttentionKind.CROSS
        fresh = plan.private.fresh and not cross and call.k is not None
        # Stored bit for bit as given, this step's keys read the same from the pool, in one loop.
        in_pool = call.stored and not fresh and (self._invariant or self._exact_kv(own.cache))
        direct = call.k is not None and not in_pool
        k, v = (call.k, call.v) if direct else (None, None)
        few = None if cross or self._invariant else plan.private.verify.get(call.group)
        if few is not None and (few.dealt.heads != own.heads or call.kind is not AttentionKind.CAUSAL):
            few = None
        if few is not None:
            verify(call.q, k, v, own.cache, few, own.causal, call.out, call.lse)
            if few.listed is None:
                return
        pool_lens = None
        if table is not None and not (direct and (cross or fresh)):
            pool_lens = plan.encoder_lens if cross else plan.prefix_lens if direct else plan.seq_lens
        step = ExtendStep(
            source=None if table is None else self._source(call),
            req_rows=plan.req_pool_indices,
            query_offsets=plan.query_offsets,
            prefix_lens=plan.prefix_lens,
            pool_lens=pool_lens,
            kv_start=None if table is None else table.kv_start,
            positions=plan.positions if plan.batch.positions is not None else None,
            mask_cells=None if cross else plan.mask_cells,
            mask_indptr=None if cross else plan.mask_indptr,
            key_offsets=_offsets(plan.encoder_lens) if cross and direct else None,
            few=0 if few is None else few.tiles.max_new,
        )
        extend(
            call.q, k, v, own.cache, step, own.heads,
            own.causal if call.kind is AttentionKind.CAUSAL else own.other,
            plan.private.extend[call.group], call.out, call.lse, anchor=self._invariant,
        )  # fmt: skip

    def _source(self, call: AttentionCall) -> torch.Tensor:
        if call.layer.spec.kind is AttentionKind.CROSS:
            assert self.table.encoder_to_token is not None
            return self.table.encoder_to_token
        return self.table.req_to_token

    def _exact_kv(self, cache: kernels.Cache) -> bool:
        """The pool stores exactly what it is given: the model's dtype, no scales."""
        return self.pool.kv_dtype == self.config.dtype and not cache.scaled

    def _layer(self, layer: AttentionLayer) -> _Layer:
        known = self._layers.get(layer.layer_id)
        if known is None or known.layer is not layer:
            known = self._layers[layer.layer_id] = self._described(layer)
        return known

    def _described(self, layer: AttentionLayer) -> _Layer:
        pool, spec = self.pool, layer.spec
        assert isinstance(pool, MHAPool)
        k_scale, v_scale = pool.scales(layer.layer_id)
        cache = kernels.Cache.of(
            pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id), pool.layout,
            k_scale.device, v_scale.device, not (k_scale.is_one and v_scale.is_one),
            pool.slot_map(layer.layer_id), self.config.form.kernel_page,
        )  # fmt: skip
        window = None if spec.kind is AttentionKind.CROSS else spec.sliding_window
        variants = (
            kernels.Variant(spec.scale, spec.logit_cap, window, layer.sinks, causal)
            for causal in (True, False)
        )
        heads = kernels.Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
        return _Layer(layer, cache, heads, *variants)


def _dealt(plan: Plan) -> Iterable[DecodeStep]:
    """Decode steps whose ranges are filled with the plan's tables."""
    return plan.private.decode.values() if isinstance(plan.private, _Step) else ()


def _even(batch: ForwardBatch, group: PlanGroup, in_capture: bool) -> bool:
    """Requests are sure to be about equally long, in every step that the plan serves."""
    exact, requests = batch.host_lens, batch.req_pool_indices.shape[0]
    if requests == 1:
        return True
    if in_capture or not isinstance(exact, Exact) or group.table.space is Space.ENCODER:
        return False
    total, longest, window = exact.total, exact.longest, group.table.window
    if window is not None and longest > window:
        total, longest = int(exact.seq_lens.clamp(max=window).sum()), window
    return total >= _EVEN * longest * requests


def _offsets(lens: torch.Tensor | None) -> torch.Tensor:
    """int32 `[B + 1]` of encoder keys given as arguments."""
    assert lens is not None
    offsets = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=offsets[1:])
    return offsets
