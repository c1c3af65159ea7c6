"""910B and 910C: which fused-infer call each plan group makes in a step.

Decode takes the documented incremental form (BSND, or BNSD over HND pools: one query token, lengths per
request). What that form ignores (bands, sinks) and everything longer takes TND, in which vllm-ascend runs
decode, extend and mixed steps alike; the documents of torch-npu 2.13 contradict themselves on TND over pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyattn.backends.ascend.ascend_calls import (
    FusedCall,
    causal_mask,
    cumulative,
    fused_operator,
    sparsity,
)
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall, step_kind
from anyattn.core.contract import BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.spec import AttentionKind
from anyattn.errors import BackendBuildError, GraphError, PoolError

__all__ = ["MAX_REQUESTS", "FusedInfer", "captured_rows", "check_requests", "key_lengths"]

MAX_REQUESTS = 4096
"""Entries of the length lists in TND (documents of torch-npu 2.13)."""
_WIDEST_ROW = 65535
"""Largest `Hkv * D` of a cache `[pages, P, Hkv * D]` (same source)."""


def check_requests(config: BackendConfig) -> None:
    """Raises `BackendBuildError` for more requests in a step than a list of lengths may have."""
    if config.limits.max_requests > MAX_REQUESTS:
        raise BackendBuildError(
            "more requests in a step than fused infer attention takes",
            asked=config.limits.max_requests,
            allowed=f"<= {MAX_REQUESTS}",
            hint="select(limits=Limits(max_requests=…))",
        )


def key_lengths(plan: Plan, listed: list[int], *, padded: int = 0) -> list[int]:
    """`listed` keys of each request; `padded` for padded rows of a decode step: with 0 they read nothing.

    In TND a mask needs as many keys as queries: both engines pad with one key, of block 0.
    """
    pads = plan.batch.num_padding_requests
    if not pads or plan.key.mode is not ForwardMode.DECODE:
        return listed
    return [*listed[: len(listed) - pads], *[padded] * pads]


def captured_rows(plan: Plan, *, in_capture: bool) -> int:
    """Query rows that belong to requests: the last cumulative length, which must be the query's.

    Raises:
        GraphError: a captured step with rows behind its last request, whose number would be frozen.
    """
    rows = sum(plan.host_extend_lens or ())
    if in_capture and rows != plan.key.num_tokens:
        raise GraphError(
            "rows behind the last request of a captured step",
            asked=f"{plan.key.num_tokens} rows, {rows} of them of requests",
            allowed="the same number of query tokens for each request, padded ones included",
            hint="pad with requests instead of single tokens, or run this step eagerly",
        )
    return rows


@dataclass(eq=False)
class _Step:
    """`Plan.private`. calls: by plan group, in order; fresh: the same over k and v alone, or None."""

    calls: list[FusedCall]
    fresh: list[FusedCall] | None
    rows: int


@dataclass(frozen=True, eq=False, slots=True)
class _Layer:
    """A layer as it was first called: number of its plan group, its cache as the kernel takes it."""

    layer: AttentionLayer
    group: int
    k: torch.Tensor
    v: torch.Tensor


class FusedInfer:
    """`npu_fused_infer_attention_score` for dense layers; its second version for those with sinks."""

    def __init__(self, library: Any, config: BackendConfig, pool: MHAPool) -> None:
        """Raises `BackendBuildError` or `PoolError` for sizes beyond the operator's."""
        check_requests(config)
        self.config, self.pool = config, pool
        self.groups = config.groups.plan_groups
        sinks = {group.sinks for group in self.groups}
        self._operators = {s: fused_operator(library, 2 if s else 1, config.name) for s in sinks}
        self._mask = causal_mask(pool.device)
        self._hnd = pool.layout == "HND"
        self._one_token = "BNSD" if self._hnd else "BSND"
        self._layers: dict[int, _Layer] = {}
        widest = max(group.num_kv_heads * max(group.head_dim, group.v_head_dim) for group in self.groups)
        if not self._hnd and widest > _WIDEST_ROW:
            raise PoolError(
                "a row of all KV heads is too wide for this layout (Hkv * D)",
                asked=widest,
                allowed=f"<= {_WIDEST_ROW}",
                hint="select(layout='HND', page_size=128)",
            )

    def plan(self, plan: Plan, *, in_capture: bool) -> _Step:
        """Host half of a step."""
        rows = captured_rows(plan, in_capture=in_capture)
        calls = [self._call(plan, group) for group in self.groups]
        paged = in_capture or not self._is_fresh(plan)
        return _Step(calls, None if paged else [self._ragged(plan, g) for g in self.groups], rows)

    def replan(self, plan: Plan) -> None:
        """Lists of a new step for the calls that a graph recorded."""
        captured_rows(plan, in_capture=True)
        for call, group in zip(plan.private.calls, self.groups, strict=True):
            call.update(self._call(plan, group))

    def _call(self, plan: Plan, group: PlanGroup) -> FusedCall:
        table = plan.tables.get(group.table)
        if table is None:
            return self._ragged(plan, group)
        assert table.host is not None
        window, decode = group.table.window, plan.key.mode is ForwardMode.DECODE
        one_token = decode and window is None and not group.sinks
        layout = self._one_token if one_token else "TND"
        lens = None if one_token else cumulative(plan.host_extend_lens or ())
        seen = {} if one_token else sparsity(self._causal(plan, group), window, self._mask)
        return FusedCall.of(
            self._operators[group.sinks], layout, group.scale, group.num_kv_heads, lens,
            key_lengths(plan, table.host.kv_lens.tolist(), padded=0 if one_token else 1),
            block_table=table.blocks, block_size=table.form.kernel_page, **seen,
        )  # fmt: skip

    def _ragged(self, plan: Plan, group: PlanGroup) -> FusedCall:
        """Keys are the step's own k and v: both lists are cumulative then."""
        lens = cumulative(plan.host_extend_lens or ())
        seen = sparsity(self._causal(plan, group), group.table.window, self._mask)
        return FusedCall.of(
            self._operators[group.sinks], "TND", group.scale, group.num_kv_heads, lens, lens, **seen
        )

    def _causal(self, plan: Plan, group: PlanGroup) -> bool:
        return step_kind(group.table.kind, plan.key.mode, plan.mask_cells is not None) is AttentionKind.CAUSAL

    def _is_fresh(self, plan: Plan) -> bool:
        """No request has a prefix, and what is stored is what is given: pages needn't be read back."""
        exact = plan.batch.exact
        extends = plan.key.mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        same = exact is not None and torch.equal(exact.seq_lens, exact.extend_lens)
        return extends and same and self.pool.kv_dtype == self.config.dtype

    def run(self, call: AttentionCall) -> None:
        """One layer: through its group's table, or over k and v."""
        step: _Step = call.plan.private
        layer = self._layers.get(call.layer.layer_id)
        if layer is None or layer.layer is not call.layer:
            layer = self._layers[call.layer.layer_id] = self._known(call)
        rows, q, out, lse = step.rows, call.q, call.out, call.lse
        if not rows:
            return
        if rows != q.shape[0]:
            q, out, lse = q[:rows], out[:rows], None if lse is None else lse[:rows]
        chosen, k, v = step.calls[layer.group], layer.k, layer.v
        if step.fresh is not None and call.k is not None:
            chosen = step.fresh[layer.group]
        if call.k is not None and call.v is not None and "block_table" not in chosen.arguments:
            k, v = call.k[:rows].contiguous(), call.v[:rows].contiguous()
        sinks = call.layer.sinks
        given = {} if sinks is None else {"learnable_sink": sinks.to(torch.bfloat16)}
        chosen.run(q, k, v, out, lse, **given)

    def _known(self, call: AttentionCall) -> _Layer:
        layer_id, page = call.layer.layer_id, self.config.form.kernel_page
        group = self.groups.index(call.group)
        k, v = self.pool.key_cache(layer_id), self.pool.value_cache(layer_id)
        if not self._hnd:  # pages of 128 inside larger ones, all heads of a token in one row
            k, v = (x.view(-1, page, x.shape[2] * x.shape[3]) for x in (k, v))
        return _Layer(call.layer, group, k, v)
