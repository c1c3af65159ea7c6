"""`cutedsl_mla`: latent decode in CuTe DSL, of tokenspeed-mla or of FlashInfer (SM100, SM103).

Decode and verification only: prefill is another backend's. Proven by emulation and by the signatures of
tokenspeed-mla 2.0.4 and FlashInfer 0.7.2 alone: no SM100 has run it.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from anyattn.backends.cuda.flashinfer_latent import WORKSPACE_BYTES, BlockTableDecode
from anyattn.backends.cuda.latents import (
    LN2,
    Latents,
    arguments_of,
    by_request,
    function_of,
    repeat_last_page,
    require_uniform,
)
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.plan import Plan
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import FeatureError

__all__ = ["CuteDslMLA"]


class _TokenSpeed:
    """`tokenspeed_mla.tokenspeed_mla_decode` (read in 2.0.4): base-2 log-sum-exp `[B, q, Hq]`.

    Its workspace holds the splits' partial results, in int8, and is nobody else's.
    """

    def __init__(self, name: str, latents: Latents, device: torch.device) -> None:
        # The module always imports; where its kernels can't be had its names are stubs without parameters.
        library = importlib.import_module("tokenspeed_mla")
        self._run = function_of(library, "tokenspeed_mla_decode", name)
        arguments_of(self._run, "kv_lora_rank", "softmax_scale", "window_left", "out", backend=name)
        self._latents = latents
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.int8, device=device)

    def __call__(self, call: AttentionCall, lens: torch.Tensor, each: int, bound: int) -> None:
        spec, mla = call.layer.spec, call.layer.spec.mla
        assert mla is not None
        assert call.table is not None
        scale = self._latents.scale(call.layer.layer_id)
        result = self._run(
            query=self._latents.query(by_request(call.q, each)),
            kv_cache=self._latents.pages(call.layer.layer_id),
            workspace_buffer=self._workspace,
            kv_lora_rank=mla.kv_lora_rank,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            block_tables=call.table.blocks,
            seq_lens=lens,
            max_seq_len=bound,
            softmax_scale=spec.scale * scale,
            output_scale=scale,
            out=by_request(call.out, each),
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            return_lse=call.lse is not None,
        )
        if call.lse is not None:
            torch.mul(result[1].view(call.lse.shape), LN2, out=call.lse)


class CuteDslMLA(AttentionBackend):
    """Block tables `[B, M]`, queries `[B, q, Hq, D]`. Latents in fp8 mean queries in fp8."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents, `BackendBuildError` for a library that is a stub."""
        super().__init__(config)
        self._latents = Latents(config)
        provider = config.provider
        self._decode = (
            BlockTableDecode(config.name, "cute-dsl", self._latents, self.pool.device)
            if provider is not None and provider.distribution.startswith("flashinfer")
            else _TokenSpeed(config.name, self._latents, self.pool.device)
        )

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the step's own tables."""
        base = super().traits(mode)
        return replace(base, shared_read_ends=SharedReadEnds.IN_REPLAY, rounds_queries=self._latents.fp8)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Query tokens per request, and a bound of the KV tokens; a graph takes the largest bound.

        Raises:
            FeatureError: requests of different lengths, or more draft tokens than a window holds.
        """
        each = require_uniform(plan, self.config.name)
        for group in plan.tables:
            if group.window is not None and each > group.window:
                raise FeatureError(
                    f"{self.config.name} shows every draft of a step to every other: the window is too small",
                    asked=f"{each} tokens a request",
                    allowed=f"at most the window, {group.window}",
                    hint="verify fewer drafts at once",
                )
        bound = self.config.limits.max_context if in_capture else plan.max_kv_len
        plan.private = each, max(1, bound)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """As the contract's; then no cell of a table names a page that may hold NaN."""
        super().init_forward_metadata_in_graph(plan)
        repeat_last_page(plan)

    def forward_decode(self, call: AttentionCall) -> None:
        """As a verification of one token."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Absorbed, always. A trimmed table lists the last tokens of each request."""
        assert call.table is not None
        self._decode(call, call.table.kv_lens, *call.plan.private)
