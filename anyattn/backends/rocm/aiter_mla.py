"""`aiter` for latent layers: `mla_decode_fwd` and `mla_prefill_fwd` absorbed, `flash_attn_varlen_func` else.

Tables are token-granular: AITER's metadata counts tokens, and a page in its place is wrong without an error.
Read in amd-aiter 0.1.7.post2.dev18 and ROCm/aiter main (mla.py, asm_mla.cu, mla_asm.csv).
Proven on stand-ins; no AMD device has run it yet.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace

import torch

from anyattn.backends.cuda.latents import Latents, per_request, require_uniform
from anyattn.backends.rocm.aiter_layers import dense_rows
from anyattn.backends.rocm.aiter_library import library_function, optional, varlen_function
from anyattn.backends.rocm.aiter_mla_work import Work, WorkPlanner, has_work_lists
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan
from anyattn.core.traits import SharedReadEnds, Traits

__all__ = ["AiterMLA"]

_PREFILL_HEADS = (16, 128)
"""What `mla_prefill_fwd` knows, of bf16 latents alone."""
_LEAST_HEADS = 16
"""Kernels of both builds begin there; fewer heads are padded."""


@dataclass(eq=False)
class _Step:
    """`Plan.private` of an absorbed step.

    Attributes:
        each: query tokens of every request; 0 = they differ, as a prefill's may. longest: their bound.
        work: by head count, how the persistent kernel shares the keys out among compute units.
    """

    each: int
    longest: int
    clear: bool = False
    work: dict[int, Work] = field(default_factory=dict)


class AiterMLA(AttentionBackend):
    """One latent head; every query head attends to it."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` without latents, `BackendBuildError` for a build without the kernels."""
        importlib.import_module("aiter")
        super().__init__(config)
        self._latents = Latents(config)
        self._decode = library_function(
            config.name, "aiter.mla", "mla_decode_fwd", "work_meta_data", "kv_scale"
        )
        self._prefill = library_function(config.name, "aiter.mla", "mla_prefill_fwd")
        self._varlen = varlen_function(config.name)
        # main has put two arguments before the scale.
        self._pages = optional(self._decode, page_size=1, nhead_kv=1)
        self._planner = WorkPlanner(config) if has_work_lists() else None
        self._heads = tuple(dict.fromkeys(_padded(spec.num_q_heads) for spec in self.pool.specs))
        self._any_lengths = not self._latents.fp8 and set(self._heads) <= set(_PREFILL_HEADS)
        self._one = torch.ones(1, dtype=torch.float32, device=self.pool.device)

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the step's own table; 8-bit latents are read with 8-bit queries."""
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            rounds_queries=self._latents.fp8,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Lengths of queries, and room for what the persistent kernel is told. Drafts of different lengths
        are prefills.

        Raises:
            FeatureError: such drafts, where no prefill kernel reads the latents.
        """
        if plan.mla_method is not None and plan.mla_method.expands:
            return
        prefill = _is_prefill(plan.key.mode) or (self._any_lengths and per_request(plan) is None)
        each = 0 if prefill else require_uniform(plan, self.config.name)
        longest = plan.key.num_tokens if in_capture and prefill else max(1, plan.max_q_len)
        step = plan.private = _Step(each, longest, clear=in_capture and prefill)
        if prefill or self._planner is None:
            return
        for heads in self._heads:
            if self._planner.serves(heads, each):
                step.work[heads] = self._planner.room(plan, heads, each)

    def replan(self, plan: Plan) -> None:
        """Nothing: work is shared out on the device, in the graph."""

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, and the work lists that follow from them, once for all layers of a head count."""
        super().init_forward_metadata_in_graph(plan)
        step: _Step | None = plan.private
        if step is None or self._planner is None:
            return
        (table,) = plan.tables.values()
        for heads, work in step.work.items():
            self._planner.fill(plan, table, heads, step.each, work)

    def forward_decode(self, call: AttentionCall) -> None:
        """As a verification of one token."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        plan, step = call.plan, call.plan.private
        if plan.mla_method is not None and plan.mla_method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        assert call.table is not None
        layer_id, heads = call.layer.layer_id, _padded(call.q.shape[1])
        if step.clear:
            call.out.zero_()
        q, out = self._latents.query(_with_heads(call.q, heads)), _room(call.out, heads)
        indptr, indices = call.table.csr
        common = {
            "q": q, "kv_buffer": self._latents.pages(layer_id)[:, :, None], "o": out,
            "qo_indptr": plan.query_offsets, "kv_indptr": indptr, "kv_indices": indices,
            "kv_last_page_lens": call.table.last_page_len, "max_seqlen_q": step.longest,
            "sm_scale": call.layer.spec.scale,
        }  # fmt: skip
        if not step.each:
            self._prefill(**common)
        else:
            work = step.work.get(heads)
            scales = {}
            if self._latents.fp8:
                scales = {"q_scale": self._one, "kv_scale": self.pool.scales(layer_id)[0].device}
            self._decode(**common, **self._pages, **(work.arguments if work else {}), **scales)
        if out is not call.out:
            call.out.copy_(out[:, : call.out.shape[1]])

    def _ragged(
        self, call: AttentionCall, k: torch.Tensor, v: torch.Tensor, part: KeyPart, out: torch.Tensor,
        lse: torch.Tensor | None, *, causal: bool,
    ) -> None:  # fmt: skip
        """CK returns the natural log-sum-exp `[Hq, T]`, and outputs in the dtype of queries."""
        spec, plan = materialised_spec(call.layer.spec), call.plan
        made, *rest = self._varlen(
            call.q if call.q.stride(2) == 1 else call.q.contiguous(),
            k,
            v if v.stride(2) == 1 else v.contiguous(),
            cu_seqlens_q=plan.query_offsets,
            cu_seqlens_k=part.offsets,
            max_seqlen_q=max(1, plan.max_q_len),
            max_seqlen_k=max(1, part.longest),
            softmax_scale=spec.scale,
            causal=causal,
            return_lse=True,
        )
        out.copy_(made)
        if lse is not None:
            lse.copy_(rest[0].t())
        if 0 in part.lens:
            _without_keys(plan, part, out, lse)


def _is_prefill(mode: ForwardMode) -> bool:
    return mode not in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


def _padded(heads: int) -> int:
    return max(heads, _LEAST_HEADS)


def _with_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    """`q [T, Hq, D]` with zero queries behind its heads."""
    if q.shape[1] == heads:
        return q
    wide = q.new_zeros((q.shape[0], heads, q.shape[2]))
    wide[:, : q.shape[1]] = q
    return wide


def _room(out: torch.Tensor, heads: int) -> torch.Tensor:
    """`out` where the kernel can write it: contiguous, all heads."""
    return dense_rows(out) if out.shape[1] == heads else out.new_empty((out.shape[0], heads, out.shape[2]))


def _without_keys(plan: Plan, part: KeyPart, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Queries of requests that have no keys here: out 0, lse -inf, whatever the kernel left there."""
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(plan.query_offsets[1:].long(), token, right=True)
    row = row.clamp_max(plan.key.num_requests - 1)
    empty = part.offsets[row] == part.offsets[row + 1]
    out.masked_fill_(empty[:, None, None], 0)
    if lse is not None:
        lse.masked_fill_(empty[:, None], -torch.inf)
