"""`fa3` and `fa4` for latent layers: scores are `q_rope · k_rope + q_latent · latent`, values the latent.

The absorbed form goes through `qv`: the rope parts are Q and K; the latent is V and, against `qv`, the other
half of K (the formula is in flash_attn/cute/interface.py of 4.0.0b36). Checked by emulation only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from anyattn.backends.cuda.flash_attention import split_count
from anyattn.backends.cuda.flash_plan import FlashPlanner, FlashStep
from anyattn.backends.cuda.flash_providers import load_flash
from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan
from anyattn.core.rows import aligned
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import FeatureError, PoolError

__all__ = ["FlashLatent", "FlashLatent3", "FlashLatent4"]


class FlashLatent(AttentionBackend):
    """Latents by pages in every mode; new tokens are read back as stored. A subclass names the version."""

    version: ClassVar[int]

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents, `LibraryError` or `FeatureError` for the build."""
        super().__init__(config)
        if not isinstance(self.pool, MLAPool):
            raise PoolError(
                f"{config.name} reads latent pools here", asked=type(self.pool).__name__, allowed="MLAPool"
            )
        self._latents = self.pool
        library = load_flash(config.provider, self.version)
        if "qv" not in library.paged.names:
            raise FeatureError(
                f"this build of FlashAttention-{self.version} has no latent form",
                asked="qv",
                allowed=", ".join(library.paged.names),
                hint="another distribution of it, or another backend",
            )
        # The builds' schedulers don't know of `qv`: the kernel makes its own schedule, layer by layer.
        self.library = replace(library, schedule=None)
        self.planner = FlashPlanner(self.library, config, split_count(config, self.version))
        offer_filler(self.compiler, self.table)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied out of the request table in every step."""
        read_ends = SharedReadEnds.IN_REPLAY
        return replace(super().traits(mode), shared_read_ends=read_ends, kv_read=KVRead.READ_BACK)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Arguments of every plan group."""
        plan.private = self.planner.step(plan, in_capture=in_capture)

    def replan(self, plan: Plan) -> None:
        """Nothing: what a graph was captured with bounds every batch of its shape."""

    def forward_decode(self, call: AttentionCall) -> None:
        """Absorbed, one query a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        step: FlashStep = call.plan.private
        method = call.plan.mla_method
        if method is not None and method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        if step.clear:
            call.out.zero_()
        rows, rank = step.rows, call.layer.spec.v_head_dim
        if not rows:
            return
        q, out = call.q[:rows], call.out[:rows]
        lse = None if call.lse is None else call.lse[:rows]
        planned = step.calls[self.config.groups.plan_groups.index(call.group)]
        cache = self._latents.latent_cache(call.layer.layer_id)
        pages = cache.view(-1, self.config.form.kernel_page, *cache.shape[2:])
        planned.function.run(
            q[..., rank:], pages[..., rank:], pages[..., :rank], planned.arguments, out, lse,
            {"qv": aligned(q[..., :rank])},
        )  # fmt: skip

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
        """Multi-head attention over expanded keys; requests without any get zero and -inf."""
        plan, spec = call.plan, materialised_spec(call.layer.spec)
        rows = plan.private.rows
        function = self.library.ragged
        bound = function.bind(
            cu_q=plan.query_offsets,
            cu_k=part.offsets,
            max_q=max(1, plan.max_q_len),
            max_k=max(1, part.longest),
            scale=spec.scale,
            causal=causal,
            cap=spec.logit_cap,
            splits=self.planner.splits,
        )
        if not rows:
            return
        short = None if lse is None else lse[:rows]
        function.run(call.q[:rows], aligned(k), aligned(v), bound, out[:rows], short)
        if short is not None:
            short.masked_fill_(torch.isposinf(short), -torch.inf)


class FlashLatent3(FlashLatent):
    """`fa3` for latents: sglang-kernel, sgl-kernel or vLLM's bundle; tokenspeed-fa3 has no such kernel."""

    version = 3


class FlashLatent4(FlashLatent):
    """`fa4` for latents, on SM100, SM103 and SM110."""

    version = 4
