"""FlashInfer's block-table decode of latents: trtllm-gen, XQA and CuTe DSL behind one function.

`flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla` (read in 0.7.2): bmm1_scale is the softmax scale times
the scales of q and k, bmm2_scale that of v; XQA multiplies the logits by bmm2_scale as well
(`qScale * kvCacheScale` in `mla_sm120.cu`), and its `out` has no axis for the one token. 8-bit latents need
8-bit queries. The log-sum-exp is base 2 but for CuTe DSL, whose is natural.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from anyattn.backends.cuda.latents import LN2, Latents, arguments_of, by_request, function_of
from anyattn.core.call import AttentionCall
from anyattn.errors import FeatureError

__all__ = ["WORKSPACE_BYTES", "BlockTableDecode"]

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer advises. Zero at first use: kernels keep counters in it and reset them themselves."""


class BlockTableDecode:
    """One inner kernel of that function, with a workspace of its own: families don't share counters."""

    def __init__(self, name: str, kernel: str, latents: Latents, device: torch.device) -> None:
        """`kernel`: `trtllm-gen`, `xqa` or `cute-dsl`.

        Raises:
            BackendBuildError: a FlashInfer without the function, or with another one.
        """
        library = importlib.import_module("flashinfer.mla")
        self._run = function_of(library, "trtllm_batch_decode_with_kv_cache_mla", name)
        names = arguments_of(self._run, "query", "kv_cache", "bmm1_scale", "backend", "out", backend=name)
        self._name, self._latents = name, latents
        self._fixed: dict[str, Any] = {"backend": kernel}
        self._takes_base = "return_lse_base" in names
        self._ragged = "cum_seq_lens_q" in names
        self._base = 1.0 if kernel == "cute-dsl" else LN2
        self._xqa = kernel == "xqa"
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: AttentionCall, lens: torch.Tensor, each: int | None, bound: int) -> None:
        """Write `call.out` and `call.lse`.

        Args:
            lens: int32 `[B]`, tokens that the table lists. bound: none has more.
            each: query tokens of every request; None = they differ, and offsets are passed.

        Raises:
            FeatureError: a log-sum-exp, or offsets, that the kernel doesn't give or take.
        """
        spec, mla, scale = call.layer.spec, call.layer.spec.mla, self._latents.scale(call.layer.layer_id)
        assert mla is not None
        assert call.table is not None
        q, out, options = call.q, call.out, dict(self._fixed)
        if each is None:
            self._check_ragged(call)
            options |= {"cum_seq_lens_q": call.plan.query_offsets, "max_q_len": max(1, call.plan.max_q_len)}
        else:
            q, out = by_request(q, each), out if self._xqa else by_request(out, each)
        if call.lse is not None:
            options |= {"return_lse": True, "lse": call.lse}
            if self._takes_base:
                options["return_lse_base"] = "basee"
        self._run(
            query=self._latents.query(q),
            kv_cache=self._latents.pages(call.layer.layer_id),
            workspace_buffer=self.workspace,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            kv_lora_rank=mla.kv_lora_rank,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            block_tables=call.table.blocks,
            seq_lens=lens,
            max_seq_len=bound,
            out=out,
            bmm1_scale=spec.scale if self._xqa else spec.scale * scale,
            bmm2_scale=scale,
            **options,
        )
        if call.lse is not None and not self._takes_base and self._base != 1.0:
            call.lse.mul_(self._base)

    def _check_ragged(self, call: AttentionCall) -> None:
        if not self._ragged or call.lse is not None:
            raise FeatureError(
                f"{self._name} gives no log-sum-exp of requests with different numbers of query tokens",
                asked=call.plan.host_extend_lens or "unknown lengths",
                allowed="one length for all requests, or no return_lse",
                hint="pad the requests to one length, or select a backend that declares both",
            )
