"""`ascend` for latent layers: fused infer attention with rope parts apart, and ragged for prefill.

Read in the documents and schemas of torch-npu 2.13.0. Absorbed: latents of 512 with rope parts of 64 in
caches of their own, pages of 128, up to 16 query tokens a request, 1, 2, 4 … 128 query heads. Materialised:
TND without pages, D 192 and Dv 128, bf16, both length lists cumulative. Not run on an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from anyattn.backends.ascend.ascend import seq_len_fill
from anyattn.backends.ascend.ascend_calls import (
    FusedCall,
    causal_mask,
    cumulative,
    fused_operator,
    sparsity,
    torch_npu,
)
from anyattn.backends.ascend.ascend_fused import captured_rows, check_requests, key_lengths
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.kv.pools.mla_split import SplitMLAPool
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan
from anyattn.core.traits import MixedSupport, SharedReadEnds, Traits
from anyattn.errors import FeatureError, PoolError

__all__ = ["MAX_QUERIES", "AscendMLA"]

MAX_QUERIES = 16
"""Query tokens of one request in an absorbed call."""


@dataclass(eq=False)
class _Part:
    """A part of a materialised step's keys: its call, and the query rows that have no keys in it."""

    call: FusedCall
    starved: torch.Tensor | None


@dataclass(eq=False)
class _Step:
    """`Plan.private`. calls: by plan group, absorbed; parts: by `KeyPart` and scale, materialised."""

    rows: int
    calls: list[FusedCall] = field(default_factory=list)
    parts: dict[tuple[int, float], _Part] = field(default_factory=dict)


class AscendMLA(AttentionBackend):
    """Absorbed steps through block tables; prefill materialised, prefixes in chunks that are merged."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for latents in one tensor, `BackendBuildError` without torch-npu's operator."""
        super().__init__(config)
        pool = self.pool
        if not isinstance(pool, SplitMLAPool):
            raise PoolError(
                "ascend reads latents and rotated keys from caches of their own",
                asked=f"{type(pool).__name__} ({pool.layout})",
                allowed="SplitMLAPool (SPLIT, NZ)",
                hint="anyattn.kv.create_pool(decision, num_slots=…)",
            )
        check_requests(config)
        self._latents, self.groups = pool, config.groups.plan_groups
        self._operator = fused_operator(torch_npu(config.name), 2, config.name)
        self._mask = causal_mask(pool.device)
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied into the step; a mixed step's rows go through one call."""
        return replace(
            super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY, mixed=MixedSupport.NATIVE
        )

    def get_cuda_graph_seq_len_fill_value(self, mode: ForwardMode, tokens_per_request: int) -> int:
        """0 for decode."""
        return seq_len_fill(mode, tokens_per_request)

    # -- planning ------------------------------------------------------------------------------------

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Calls of the step's method.

        Raises:
            FeatureError: an absorbed step with more query tokens of a request than the operator takes.
        """
        assert plan.mla_method is not None
        if plan.mla_method.expands:
            plan.private = self._materialised(plan)
        else:
            rows = captured_rows(plan, in_capture=in_capture)
            plan.private = _Step(rows, self._absorbed(plan))

    def replan(self, plan: Plan) -> None:
        """Lists of a new step for the calls that a graph recorded."""
        captured_rows(plan, in_capture=True)
        for call, fresh in zip(plan.private.calls, self._absorbed(plan), strict=True):
            call.update(fresh)

    def _absorbed(self, plan: Plan) -> list[FusedCall]:
        if plan.max_q_len > MAX_QUERIES:
            raise FeatureError(
                "absorbed steps of ascend take few query tokens of a request",
                asked=plan.max_q_len,
                allowed=f"<= {MAX_QUERIES}",
                hint="fewer drafts, or MLAPolicy(method=MLAMethod.MATERIALISED) for prefill",
            )
        lens = cumulative(plan.host_extend_lens or ())
        calls = []
        for group in self.groups:
            table = plan.tables[group.table]
            assert table.host is not None
            kv_lens = key_lengths(plan, table.host.kv_lens.tolist())
            # With one query token the operator wants no mask at all.
            seen = sparsity(plan.max_q_len > 1, None, self._mask)
            paged = {"block_table": table.blocks, "block_size": table.form.kernel_page}
            call = FusedCall.of(self._operator, "TND", group.scale, 1, lens, kv_lens, **paged, **seen)
            calls.append(call)
        return calls

    def _materialised(self, plan: Plan) -> _Step:
        keys = plan.mla_keys
        assert keys is not None
        queries = keys.new.lens  # padded requests have none here
        step = _Step(sum(queries))
        for scale in {group.scale for group in self.groups}:
            for part in (keys.new, *keys.prefix):
                seen = sparsity(part is keys.new, None, self._mask)
                call = FusedCall.of(
                    self._operator, "TND", scale, None, cumulative(queries), part.bounds[1:], **seen
                )
                step.parts[id(part), scale] = _Part(call, self._starved(queries, part))
        return step

    def _starved(self, queries: Sequence[int], part: KeyPart) -> torch.Tensor | None:
        """Rows int64 of requests without keys in this part: no document says what the operator answers."""
        rows: list[int] = []
        first = 0
        for new, seen in zip(queries, part.lens, strict=True):
            if not seen:
                rows.extend(range(first, first + new))
            first += new
        if not rows:
            return None
        return torch.tensor(rows, dtype=torch.int64).to(self.pool.device, non_blocking=True)

    # -- compute -------------------------------------------------------------------------------------

    def forward_decode(self, call: AttentionCall) -> None:
        """Absorbed, one query token a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        method = call.plan.mla_method
        assert method is not None
        if method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        step: _Step = call.plan.private
        rows, rank = slice(step.rows), call.layer.spec.v_head_dim
        if not step.rows:
            return
        latents, ropes = self._cache(call.layer.layer_id)
        planned = step.calls[self.groups.index(call.group)]
        q, lse = call.q[rows], None if call.lse is None else call.lse[rows]
        planned.run(
            q[..., :rank], latents, latents, call.out[rows], lse,
            query_rope=q[..., rank:].contiguous(), key_rope=ropes,
        )  # fmt: skip

    def _cache(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts as the operator takes them: `[pages, 128, size]`, or the tiles of NZ as they are."""
        found = self._caches.get(layer_id)
        if found is None:
            latents, ropes = self._latents.parts(layer_id)
            if self._latents.layout != "NZ":
                page = self.config.form.kernel_page
                latents, ropes = (x.view(-1, page, x.shape[3]) for x in (latents, ropes))
            found = self._caches[layer_id] = latents, ropes
        return found

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
        """One part of a materialised step; `causal` is in its plan."""
        del causal
        step: _Step = call.plan.private
        if not step.rows:
            return
        rows = slice(step.rows)
        planned = step.parts[id(part), materialised_spec(call.layer.spec).scale]
        sums = None if lse is None else lse[rows]
        planned.call.run(
            call.q[rows], k.contiguous(), v.contiguous(), out[rows], sums, num_key_value_heads=k.shape[1]
        )
        if planned.starved is not None:
            out.index_fill_(0, planned.starved, 0)
            if lse is not None:
                lse.index_fill_(0, planned.starved, -torch.inf)
