"""The legacy half of `intel_amx`: IPEX's paged attention, for hosts that stay on torch 2.8.

Archived by its makers, and slow on AVX2: kept for being right. Its cache is `[N, Hkv, P, D]`, whatever its
docstrings say; another shape crashes the process, so pools are checked before anything is called.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import TableGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import PoolError

__all__ = ["IpexAttention"]


@dataclass(frozen=True, eq=False)
class _Layer:
    """Caches `[N, Hkv, P, D]`, the KV head of each query head, and the layer's numbers; cap -1 is none."""

    layer: AttentionLayer
    k: torch.Tensor
    v: torch.Tensor
    heads: torch.Tensor
    scale: float
    cap: float


class IpexAttention(AttentionBackend):
    """One query a request by IPEX's decode kernel, more by its flash attention over the same pages."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't HND: the library would read beside it."""
        super().__init__(config)
        if not isinstance(self.pool, MHAPool) or self.pool.layout != "HND":
            have = f"{type(self.pool).__name__} ({self.pool.layout})"
            raise PoolError("IPEX reads MHA pools", asked=have, allowed="MHAPool (HND)")
        modules: Any = importlib.import_module("intel_extension_for_pytorch.llm.modules")
        self._paged = modules.PagedAttention
        self._layers: dict[int, _Layer] = {}

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied while planning."""
        return replace(super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, and for extends the offsets of each request's keys, int32 `[B + 1]`."""
        super().init_forward_metadata_in_graph(plan)
        offsets: dict[TableGroup, torch.Tensor] = {}
        for group, table in plan.tables.items():
            offsets[group] = torch.zeros(table.kv_lens.shape[0] + 1, dtype=torch.int32)
            torch.cumsum(table.kv_lens, 0, dtype=torch.int32, out=offsets[group][1:])
        plan.private = offsets

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """By the library's writer."""
        own = self._layer(layer)
        self._paged.reshape_and_cache(k.contiguous(), v.contiguous(), own.k, own.v, loc)

    def forward_decode(self, call: AttentionCall) -> None:
        """The single-query kernel."""
        if not call.q.shape[0]:
            return
        own, table, plan = self._layer(call.layer), call.table, call.plan
        assert table is not None
        out = _dense(call.out)
        self._paged.single_query_cached_kv_attention(
            out, call.q.contiguous(), own.k, own.v, own.heads, own.scale, table.blocks, table.kv_lens,
            own.k.shape[2], plan.max_kv_len, None, -1, 1.0, 1.0, own.cap,
        )  # fmt: skip
        if out is not call.out:
            call.out.copy_(out)

    def forward_extend(self, call: AttentionCall) -> None:
        """Causal, bottom-right aligned, over everything in the pool."""
        if not call.q.shape[0]:
            return
        own, table, plan = self._layer(call.layer), call.table, call.plan
        assert table is not None
        out = _dense(call.out)
        self._paged.flash_attn_varlen_func(
            out, call.q.contiguous(), own.k, own.v, plan.query_offsets, plan.private[call.group.table],
            plan.max_q_len, plan.max_kv_len, own.scale, True, table.blocks, None, -1, -1, "auto", 1.0, 1.0,
            own.cap,
        )  # fmt: skip
        if out is not call.out:
            call.out.copy_(out)

    def _layer(self, layer: AttentionLayer) -> _Layer:
        known = self._layers.get(layer.layer_id)
        if known is None or known.layer is not layer:
            pool, spec = self.pool, layer.spec
            assert isinstance(pool, MHAPool)
            heads = torch.arange(spec.num_kv_heads, dtype=torch.int32)
            known = self._layers[layer.layer_id] = _Layer(
                layer, pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id),
                heads.repeat_interleave(spec.num_q_heads // spec.num_kv_heads), spec.scale,
                spec.logit_cap or -1.0,
            )  # fmt: skip
        return known


def _dense(out: torch.Tensor) -> torch.Tensor:
    """Outputs are written without their strides."""
    return out if out.is_contiguous() else out.new_empty(out.shape)
