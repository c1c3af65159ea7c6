"""`trtllm_mla`: trtllm-gen's latent decode and its ragged prefill, as FlashInfer ships them (SM100, SM103).

Proven by emulation and by the signatures of FlashInfer 0.7.2 alone: no SM100 has run it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyattn.backends.cuda.flashinfer_latent import BlockTableDecode
from anyattn.backends.cuda.latents import (
    LN2,
    Latents,
    arguments_of,
    function_of,
    per_request,
    repeat_last_page,
)
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan
from anyattn.core.rows import dense
from anyattn.core.traits import SharedReadEnds, Traits

__all__ = ["TrtllmMLA"]


@dataclass(eq=False)
class _Step:
    """`Plan.private`.

    Attributes:
        each: query tokens of every request, None where they differ. bound: no request has more KV tokens.
        queries: int64 `[B]` on the host; keys: for each part, int32 `[B]` on the device and on the host.
    """

    each: int | None
    bound: int
    queries: torch.Tensor | None = None
    keys: dict[KeyPart, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class TrtllmMLA(AttentionBackend):
    """Block tables, no plan of the library's own. Latents in fp8 mean queries in fp8 (`rounds_queries`)."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents, `BackendBuildError` for another FlashInfer."""
        super().__init__(config)
        self._latents = Latents(config)
        self._decode = BlockTableDecode(config.name, "trtllm-gen", self._latents, self.pool.device)
        prefill = importlib.import_module("flashinfer.prefill")
        self._prefill = function_of(prefill, "trtllm_ragged_attention_deepseek", config.name)
        # Without host lengths the kernel takes every row for active, and a chunk has rows without keys.
        needed = ("q_seq_lens_cpu", "kv_seq_lens_cpu", "cum_seq_lens_kv", "out", "lse")
        arguments_of(self._prefill, *needed, backend=config.name)

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the step's own tables."""
        base = super().traits(mode)
        return replace(base, shared_read_ends=SharedReadEnds.IN_REPLAY, rounds_queries=self._latents.fp8)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Bounds, and the lengths of a materialised step's parts. A graph takes the largest bound."""
        bound = self.config.limits.max_context if in_capture else plan.max_kv_len
        step = plan.private = _Step(per_request(plan), max(1, bound))
        if plan.mla_keys is None:
            return
        assert plan.batch.exact is not None
        step.queries = plan.batch.exact.extend_lens
        for part in (plan.mla_keys.new, *plan.mla_keys.prefix):
            device = part.offsets[1:] - part.offsets[:-1]
            step.keys[part] = device, torch.tensor(part.lens, dtype=torch.int32)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """As the contract's; then no cell of a table names a page that may hold NaN."""
        super().init_forward_metadata_in_graph(plan)
        repeat_last_page(plan)

    def forward_decode(self, call: AttentionCall) -> None:
        """As any other step."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        method, step = call.plan.mla_method, call.plan.private
        if method is not None and method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        self._decode(call, call.plan.seq_lens, step.each, step.bound)

    def _ragged(
        self,
        call: AttentionCall,
        k: torch.Tensor,
        v: torch.Tensor,
        part: KeyPart,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool,
    ) -> None:
        """Its log-sum-exp is base 2; rows without keys are told by the lengths on the host."""
        plan, step, dtype = call.plan, call.plan.private, self.config.dtype
        rows = int(step.queries.sum())
        direct = out[:rows] if out.dtype == dtype else None
        options: dict[str, Any] = {} if lse is None else {"lse": lse[:rows]}
        device, host = step.keys[part]
        result = self._prefill(
            query=dense(call.q[:rows]),
            key=dense(k),
            value=dense(v),
            workspace_buffer=self._decode.workspace,
            seq_lens=device,
            max_q_len=plan.max_q_len,
            max_kv_len=max(1, part.longest),
            bmm1_scale=materialised_spec(call.layer.spec).scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=plan.key.num_requests,
            window_left=-1,
            cum_seq_lens_q=plan.query_offsets,
            cum_seq_lens_kv=part.offsets,
            enable_pdl=None,
            is_causal=causal,
            return_lse=lse is not None,
            out=direct,
            q_seq_lens_cpu=step.queries,
            kv_seq_lens_cpu=host,
            **options,
        )
        if direct is None:
            out[:rows].copy_(result[0] if lse is not None else result)
        if lse is not None:
            lse[:rows].mul_(LN2)
