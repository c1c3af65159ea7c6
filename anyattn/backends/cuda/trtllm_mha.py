"""`trtllm_mha`: TensorRT-LLM's kernels as FlashInfer ships them. trtllm-gen runs decode, chains of drafts and
extends on SM100 and SM103; XQA runs decode and chains on SM90, SM120 and SM121.

What runs on SM100 and SM12x is proven by emulation and by the signatures of FlashInfer 0.7.2 alone.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.cuda.fused_writes import FusedWrites
from anyattn.backends.cuda.trtllm_layers import (
    LN2,
    Layer,
    Memory,
    chain_mask,
    dense_rows,
    new_layer,
)
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.groups import TableGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.plan import Plan, Table
from anyattn.core.rows import aligned, dense
from anyattn.core.spec import Limits
from anyattn.core.state import AttentionState
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import BackendBuildError, PoolError

__all__ = ["TrtllmMHA"]

_XQA, _XQA_ROUNDING = "xqa", "xqa with 8-bit products"


@dataclass(eq=False)
class _Step:
    """`Plan.private`. `bound`: KV tokens of a request at most; `kv_offsets`: running sums of the tables'
    lengths, int32 `[B + 1]`, for context kernels; `chain`: XQA's mask of `drafts` tokens a request."""

    bound: int
    drafts: int = 0
    kv_offsets: dict[TableGroup, torch.Tensor] = field(default_factory=dict)
    chain: torch.Tensor | None = None


class TrtllmMHA(FusedWrites):
    """Block tables and lengths on the device; nothing of the library's own is planned."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD or HND, `BackendBuildError` for another FlashInfer."""
        decode, prefill = (importlib.import_module(f"flashinfer.{name}") for name in ("decode", "prefill"))
        super().__init__(config)
        pool = self.pool
        if not isinstance(pool, MHAPool) or pool.layout not in ("NHD", "HND"):
            have = f"{type(pool).__name__} ({pool.layout})"
            raise PoolError("trtllm_mha reads MHA pools", asked=have, allowed="MHAPool in NHD or HND")
        methods = {mode: config.row_for(mode).method for mode in ForwardMode}
        self._uses_xqa = {mode: method in (_XQA, _XQA_ROUNDING) for mode, method in methods.items()}
        self._rounding = {mode for mode, method in methods.items() if method == _XQA_ROUNDING}
        self._xqa = _function(decode, "xqa_batch_decode_with_kv_cache")
        if self._uses_xqa[ForwardMode.TARGET_VERIFY]:
            _check_ragged(self._xqa)
        self._gen_decode = _function(decode, "trtllm_batch_decode_with_kv_cache")
        self._gen_context = _function(prefill, "trtllm_batch_context_with_kv_cache")
        self._memory = Memory(config, pool.device)
        self._layers: dict[tuple[int, bool], Layer] = {}
        offer_filler(self.compiler, config.table)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied while planning; a step reads its own tokens from the pool."""
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            kv_read=KVRead.READ_BACK,
            rounds_queries=is_fp8(self.pool.kv_dtype)
            and (mode in self._rounding or not self._uses_xqa[mode]),
        )

    # -- planning ------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, limits: Limits) -> None:
        """Buffers of the tables, and of what this family adds to them."""
        super().init_cuda_graph_state(limits)
        self._memory.hold()

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Bounds and storage; a captured kernel keeps its bound, so that is the largest context."""
        mode = plan.key.mode
        step = _Step(self.config.limits.max_context if in_capture else max(1, plan.max_kv_len))
        stable = plan.stable
        self._memory.cover(plan.key.num_requests, max(1, plan.max_q_len), stable=stable)
        if mode is ForwardMode.TARGET_VERIFY and self._uses_xqa[mode]:
            step.drafts = self._memory.drafts(plan.max_q_len)
            step.chain = self._memory.chain(plan.key.num_tokens, step.drafts, stable=stable)
        elif self._is_context(mode):
            for index, group in enumerate(plan.tables):
                step.kv_offsets[group] = self._memory.offsets(index, plan.key.num_requests, stable=stable)
        plan.private = step

    def replan(self, plan: Plan) -> None:
        """Nothing: bounds are those of the largest step, and sums and masks are filled inside the graph."""

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, then the running sums and masks that follow from them."""
        super().init_forward_metadata_in_graph(plan)
        if plan.private is None:
            return
        for group, offsets in plan.private.kv_offsets.items():
            torch.cumsum(plan.tables[group].kv_lens, 0, dtype=torch.int32, out=offsets[1:])
        if plan.private.chain is not None:
            chain_mask(plan.query_offsets, plan.private.chain)

    @staticmethod
    def _is_context(mode: ForwardMode) -> bool:
        return mode not in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)

    # -- compute -------------------------------------------------------------------------------------

    def forward_decode(self, call: AttentionCall) -> None:
        """One query a request."""
        if self._uses_xqa[ForwardMode.DECODE]:
            self._run_xqa(call, {})
        else:
            self._run_gen(
                self._gen_decode, call, {"backend": "trtllm-gen", "max_seq_len": call.plan.private.bound}
            )

    def forward_extend(self, call: AttentionCall) -> None:
        """Chains of drafts go to the decode kernels, all else to the context kernel."""
        plan = call.plan
        step: _Step = plan.private
        if plan.max_q_len == 0:
            return
        if self._is_context(plan.key.mode):
            assert call.table is not None
            self._run_gen(
                self._gen_context, call,
                {
                    "max_q_len": plan.max_q_len,
                    "max_kv_len": step.bound,
                    "batch_size": plan.key.num_requests,
                    "cum_seq_lens_q": plan.query_offsets,
                    "cum_seq_lens_kv": step.kv_offsets[call.group.table],
                },
            )  # fmt: skip
        elif self._uses_xqa[plan.key.mode]:
            assert step.chain is not None
            mask = step.chain.view(torch.uint16)
            self._run_xqa(
                call, {"q_len_per_req": step.drafts, "mask": mask, "q_cu_seq_lens": plan.query_offsets}
            )
        else:
            ragged = {
                "q_len_per_req": None,
                "max_q_len": plan.max_q_len,
                "cum_seq_lens_q": plan.query_offsets,
            }
            self._run_gen(
                self._gen_decode, call, {"backend": "trtllm-gen", "max_seq_len": step.bound, **ragged}
            )

    def _run_xqa(self, call: AttentionCall, chain: dict[str, Any]) -> None:
        """Its kernels know no strides of queries and outputs, and return no log-sum-exp."""
        layer, table = self._layer(call, xqa=True), _table(call)
        out = dense_rows(call.out)
        self._xqa(
            query=dense(layer.query(call.q)), max_seq_len=call.plan.private.bound, out=out,
            sinks=layer.sinks, **self._common(layer, table), **chain,
        )  # fmt: skip
        layer.finish(out, call.out)

    def _run_gen(self, kernel: Any, call: AttentionCall, shape: dict[str, Any]) -> None:
        """Its log-sum-exp is in base 2. With sinks asked for too, they are counted here, once."""
        layer, table = self._layer(call, xqa=False), _table(call)
        lse, out = call.lse, dense_rows(call.out)
        kernel(
            query=aligned(layer.query(call.q)), out=out, sinks=layer.sinks if lse is None else None, lse=lse,
            multi_ctas_kv_counter_buffer=self._memory.counters, **self._common(layer, table), **shape,
        )  # fmt: skip
        layer.finish(out, call.out)
        if lse is None:
            return
        lse.mul_(LN2)
        if layer.sinks is not None:
            state = AttentionState(call.out, lse).finalise(layer.sinks)
            call.out.copy_(state.out)
            lse.copy_(state.lse)

    def _common(self, layer: Layer, table: Table) -> dict[str, Any]:
        return {
            "kv_cache": layer.cache,
            "workspace_buffer": self._memory.workspace,
            "block_tables": table.blocks,
            "seq_lens": table.kv_lens,
            "bmm1_scale": layer.bmm1,
            "bmm2_scale": layer.bmm2,
            "window_left": layer.window_left,
            "kv_layout": self.pool.layout,
        }

    def _layer(self, call: AttentionCall, *, xqa: bool) -> Layer:
        key = (call.layer.layer_id, xqa)
        known = self._layers.get(key)
        if known is None or known.layer is not call.layer:
            assert isinstance(self.pool, MHAPool)
            known = self._layers[key] = new_layer(call.layer, self.pool, xqa=xqa)
        return known


def _table(call: AttentionCall) -> Table:
    assert call.table is not None
    return call.table


def _function(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise BackendBuildError(
            f"flashinfer has no {name}",
            asked=getattr(importlib.import_module("flashinfer"), "__version__", "unknown version"),
            allowed="flashinfer-python >= 0.7",
            hint="pip install 'flashinfer-python>=0.7'",
        )
    return found


def _check_ragged(xqa: Any) -> None:
    """Drafts of different lengths in one call: told by the signature."""
    if "q_cu_seq_lens" not in inspect.signature(xqa).parameters:
        raise BackendBuildError(
            "this XQA verifies no ragged drafts",
            asked="flashinfer without q_cu_seq_lens",
            allowed="flashinfer-python >= 0.7.2",
            hint="pip install 'flashinfer-python>=0.7.2', or verify on another backend",
        )
