"""`intel_amx`: vLLM's CPU kernels on x86, from AVX2 to AMX; decode, extend and mixed steps in one call.

Proven on an AVX-512 machine (the AVX-512 and the AVX2 build); AMX by its stand-in alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from anyattn.backends.intel.ipex import IpexAttention
from anyattn.backends.intel.vllm_cpu_pages import ISA_OF_LAYOUT, packed_format
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.packed import PackedFormat, PackedPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import PoolError
from anyattn.kernels.vllm_cpu import Kernels, load_kernels

__all__ = ["IntelAMX"]

_SINK_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What the operators need of one layer, the same in every step. Windows count keys, -1 is none."""

    layer: AttentionLayer
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    window: int
    cap: float


class IntelAMX(AttentionBackend):
    """Pages in the library's own format; the pool's layout says which instruction set wrote them.

    Where the row that passed is IPEX's, this makes an `IpexAttention`.
    """

    def __new__(cls, config: BackendConfig) -> AttentionBackend:  # type: ignore[misc]
        """The adapter of the row's library."""
        if config.row.method.startswith("IPEX"):
            return IpexAttention(config)
        return super().__new__(cls)

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for another pool, `BackendBuildError` where the library doesn't load."""
        super().__init__(config)
        if not isinstance(self.pool, PackedPool) or self.pool.layout not in ISA_OF_LAYOUT:
            have = f"{type(self.pool).__name__} ({self.pool.layout})"
            raise PoolError(
                "intel_amx reads pages of its own", asked=have, allowed=" or ".join(ISA_OF_LAYOUT),
                hint="anyattn.kv.create_pool(decision, …)",
            )  # fmt: skip
        self._isa = ISA_OF_LAYOUT[self.pool.layout]
        self._kernels: Kernels = load_kernels(self._isa)
        self._layers: dict[int, _Layer] = {}

    @classmethod
    def packed_format(cls, layout: str, dtype: torch.dtype) -> PackedFormat:
        """How `create_pool` lays out pages for this backend. Raises as `vllm_cpu_pages.packed_format`."""
        return packed_format(layout, dtype)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables and lengths are copied while planning; lengths of a CPU are on the host anyway."""
        return replace(super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, then how each plan group's work is spread over threads: that reads the lengths."""
        super().init_forward_metadata_in_graph(plan)
        plan.private = {}
        if plan.key.num_tokens:
            for group, heads in self.config.groups.max_q_heads.items():
                plan.private[group, heads] = self._scheduled(plan, group, heads)

    def _scheduled(self, plan: Plan, group: PlanGroup, heads: int) -> torch.Tensor:
        """The library's schedule (int8) for layers of `heads` query heads."""
        lengths = plan.tables[group.table].kv_lens
        window = -1 if group.table.window is None else group.table.window
        return self._kernels.schedule(
            lengths.shape[0], heads, group.num_kv_heads, group.head_dim, lengths, self.config.dtype,
            plan.query_offsets, True, window, self._isa, True, None, "auto",
        )  # fmt: skip

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """By the library's own writer."""
        own = self._layer(layer)
        self._kernels.write(_rows(k), _rows(v), own.k, own.v, loc, self._isa, 1.0, 1.0, "auto")

    def forward_decode(self, call: AttentionCall) -> None:
        """One query a request is no case of its own."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Causal over everything in the pool, this step's own tokens included."""
        heads = call.q.shape[1]
        if not call.q.shape[0]:
            return
        plan, table, own = call.plan, call.table, self._layer(call.layer)
        assert table is not None
        schedule: dict[Any, torch.Tensor] = plan.private
        known = schedule.get((call.group, heads))
        if known is None:  # a layer with fewer heads than its group's largest
            known = schedule[call.group, heads] = self._scheduled(plan, call.group, heads)
        out = call.out if call.out.is_contiguous() else torch.empty_like(call.out, memory_format=_DENSE)
        self._kernels.attend(
            _rows(call.q), own.k, own.v, out, plan.query_offsets, table.kv_lens, own.scale, True, None,
            own.window, table.blocks, own.cap, known, _sinks(call.layer), None, 1.0, 1.0, "auto",
        )  # fmt: skip
        if out is not call.out:
            call.out.copy_(out)

    def _layer(self, layer: AttentionLayer) -> _Layer:
        known = self._layers.get(layer.layer_id)
        if known is None or known.layer is not layer:
            pool, spec = self.pool, layer.spec
            assert isinstance(pool, PackedPool)
            window = -1 if spec.sliding_window is None else spec.sliding_window
            known = self._layers[layer.layer_id] = _Layer(
                layer, pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id), spec.scale, window,
                spec.logit_cap or 0.0,
            )  # fmt: skip
        return known


_DENSE = torch.contiguous_format


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The operators follow strides of tokens and heads, not within a head."""
    return x if x.stride(2) == 1 else x.contiguous()


def _sinks(layer: AttentionLayer) -> torch.Tensor | None:
    """float32 or bf16 `[Hq]`: other types are refused there."""
    sinks = layer.sinks
    if sinks is None or (sinks.dtype in _SINK_DTYPES and sinks.is_contiguous()):
        return sinks
    return sinks.float().contiguous()
