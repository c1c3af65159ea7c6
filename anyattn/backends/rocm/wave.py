"""`wave`: AMD's Wave DSL templates, over token indices, for gfx942 and gfx950 (and gfx90a, unseen).

The extend kernel reads the cached prefix through its table, and the step's own tokens from k and v. Its calls
are proven on a stand-in; the templates compile for the chips named; no AMD device has run it yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.rocm.aiter_layers import dense_rows
from anyattn.backends.rocm.wave_kernels import SPLITS, Compiler, Shape
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.metadata.tables import fill_csr
from anyattn.core.plan import Plan, Table
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import PoolError

__all__ = ["WaveAttention"]

Partials = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Prefix:
    """What the extend kernel reads from the pool: `indptr [B + 1]`, `indices`, int32; `own [T]`: slots of the
    step's tokens, for layers that pass no k and v."""

    indptr: torch.Tensor
    indices: torch.Tensor
    own: torch.Tensor


@dataclass(eq=False)
class _Step:
    """`Plan.private`: of a decode, partial results by plan group; of an extend, the prefix."""

    partials: dict[PlanGroup, Partials]
    prefix: _Prefix | None = None


@dataclass(frozen=True, eq=False)
class _Layer:
    """Caches as slots `[S, Hkv, D]`, and what is compiled for the layer."""

    layer: AttentionLayer
    k: torch.Tensor
    v: torch.Tensor
    shape: Shape


class WaveAttention(AttentionBackend):
    """Compiled per scale, cap and head shape. No window, sinks, scales or LSE: its rows refuse them."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD."""
        self._compiler = Compiler()
        super().__init__(config)
        if not isinstance(self.pool, MHAPool) or self.pool.layout != "NHD":
            have = f"{type(self.pool).__name__} ({self.pool.layout})"
            raise PoolError("wave reads MHA pools", asked=have, allowed="MHAPool (NHD)")
        self._layers: dict[int, _Layer] = {}
        self._held: dict[tuple[PlanGroup, int], Partials] = {}
        offer_filler(self.compiler, self.table)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied while planning. What a step stores and what it is given are the same bits."""
        base = super().traits(mode)
        return replace(base, shared_read_ends=SharedReadEnds.IN_REPLAY, kv_read=KVRead.READ_BACK)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Partial results of exactly this batch's size: kernels read it from their shapes."""
        step = plan.private = _Step({})
        if plan.key.mode is ForwardMode.DECODE:
            for group, heads in self.config.groups.max_q_heads.items():
                step.partials[group] = self._partials(plan, group, heads)
            return
        (table,) = plan.tables.values()
        _, indices = table.csr
        step.prefix = _Prefix(
            plan.query_offsets.new_empty(plan.key.num_requests + 1),
            torch.empty_like(indices),
            torch.empty_like(plan.positions),
        )

    def replan(self, plan: Plan) -> None:
        """Nothing: a decode's lengths are read on the device."""

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, and those of prefixes."""
        super().init_forward_metadata_in_graph(plan)
        if plan.private is None or plan.private.prefix is None or not plan.key.num_requests:
            return
        prefix, source, rows = plan.private.prefix, self.table.req_to_token, plan.req_pool_indices
        (table,) = plan.tables.values()
        fill_csr(
            source, rows, torch.zeros_like(plan.prefix_lens), plan.prefix_lens, 1, prefix.indptr,
            prefix.indices, table.form.fill,
        )  # fmt: skip
        token = torch.arange(prefix.own.shape[0], device=source.device)
        row = torch.searchsorted(plan.query_offsets[1:], token, right=True).clamp_max_(rows.shape[0] - 1)
        column = plan.prefix_lens[row] + token - plan.query_offsets[row]
        prefix.own.copy_(source[rows[row], column.clamp_(0, source.shape[1] - 1)])

    def forward_decode(self, call: AttentionCall) -> None:
        """Parts of a request's keys, then their join."""
        layer, (partial, lse) = self._layer(call), call.plan.private.partials[call.group]
        heads = call.q.shape[1]
        if lse.shape[2] != heads:
            partial, lse = _room(call.group, heads, call.q.shape[0], call.q.device)
        indptr, indices = _table(call).csr
        parts, join = self._compiler.decode(layer.shape)
        out = dense_rows(call.out)
        parts(call.q.contiguous(), layer.k, layer.v, indptr, indices, partial, lse)
        join(partial, lse, indptr, out)
        if out is not call.out:
            call.out.copy_(out)

    def forward_extend(self, call: AttentionCall) -> None:
        """Causal over the prefix and the step's own tokens."""
        plan, layer = call.plan, self._layer(call)
        if plan.max_q_len == 0:
            return
        prefix: _Prefix = plan.private.prefix
        k, v = call.k, call.v
        if k is None or v is None:
            k, v = layer.k.index_select(0, prefix.own), layer.v.index_select(0, prefix.own)
        out = dense_rows(call.out)
        # Wave copies what isn't contiguous, outputs too, and drops the copy.
        self._compiler.extend(layer.shape, plan.max_q_len)(
            call.q.contiguous(), k.contiguous(), v.contiguous(), layer.k, layer.v, plan.query_offsets,
            prefix.indptr, prefix.indices, plan.max_q_len, out,
        )  # fmt: skip
        if out is not call.out:
            call.out.copy_(out)

    def _partials(self, plan: Plan, group: PlanGroup, heads: int) -> Partials:
        key = group, plan.key.num_requests
        if plan.stable and key in self._held:
            return self._held[key]
        made = _room(group, heads, plan.key.num_requests, self.pool.device)
        if plan.stable:
            self._held[key] = made
        return made

    def _layer(self, call: AttentionCall) -> _Layer:
        known = self._layers.get(call.layer.layer_id)
        if known is None or known.layer is not call.layer:
            known = self._layers[call.layer.layer_id] = self._new_layer(call.layer)
        return known

    def _new_layer(self, layer: AttentionLayer) -> _Layer:
        pool, spec = self.pool, layer.spec
        assert isinstance(pool, MHAPool)
        k, v = pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id)
        shape = Shape(
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, self.config.dtype,
            spec.scale, spec.logit_cap or 0.0,
        )  # fmt: skip
        return _Layer(layer, k.flatten(0, 1), v.flatten(0, 1), shape)


def _room(group: PlanGroup, heads: int, requests: int, device: torch.device) -> Partials:
    """float32 `[splits, B, Hq, Dv]` and `[splits, B, Hq]` (base 2, internal to the two kernels)."""
    return (
        torch.empty((SPLITS, requests, heads, group.v_head_dim), dtype=torch.float32, device=device),
        torch.empty((SPLITS, requests, heads), dtype=torch.float32, device=device),
    )


def _table(call: AttentionCall) -> Table:
    assert call.table is not None
    return call.table
