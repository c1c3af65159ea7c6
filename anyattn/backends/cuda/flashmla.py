"""`flashmla`: FlashMLA's dense decode on SM90, of sgl-flash-mla, tokenspeed-flashmla or sglang-kernel.

It serves decode and verification; prefill is another backend's. Read in sgl-flash-mla 1.0.0 (dense kernels
behind `use_legacy`), tokenspeed-flashmla 1.0.0 and `sgl_kernel.flash_mla`: pages of 64, latents of 512 + 64,
queries `[B, q, Hq, 576]`, natural-log LSE `[B, Hq, q]`; 8-bit latents need 8-bit queries and both descales.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyattn.backends.cuda.latents import Latents, arguments_of, by_request, function_of, require_uniform
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.plan import Plan
from anyattn.core.traits import GraphSupport, HostLengthNeed, SharedReadEnds, Traits
from anyattn.errors import BackendBuildError

__all__ = ["FlashMLA"]

_MODULES = {"sgl_kernel": "sgl_kernel.flash_mla"}
"""Where a provider's functions are, if not in the module that it owns."""

Schedule = tuple[Any, Any]
"""The two arguments that say how KV is split: `(object, None)`, or two tensors in older builds."""


@dataclass(eq=False)
class _Step:
    """`Plan.private`: query tokens of every request; for each head count, its schedule of this step."""

    each: int
    schedules: dict[int, Schedule]


class _Scheduler:
    """Makes a step's schedule in the way that the installed build offers.

    Attributes:
        stable: made before the first layer runs, from tensors, so that a graph's can be refreshed in place.
    """

    def __init__(self, library: Any, fp8: bool, name: str) -> None:
        self._new = function_of(library, "get_mla_metadata", name)
        kinds = [p.kind for p in inspect.signature(self._new).parameters.values()]
        self._objects = inspect.Parameter.VAR_POSITIONAL in kinds
        ahead = getattr(library, "get_mla_decoding_metadata", None) if self._objects else self._new
        self._ahead: Callable[..., Any] | None = ahead
        self.stable = ahead is not None
        self._options: dict[str, Any] = {"is_fp8_kvcache": fp8}
        if ahead is not None and "use_legacy" in inspect.signature(ahead).parameters:
            self._options["use_legacy"] = True
        if fp8 and ahead is None:
            raise BackendBuildError(
                f"{name} reads 8-bit latents with metadata made ahead",
                asked=f"{library.__name__} without get_mla_decoding_metadata",
                allowed="sgl-flash-mla",
                hint="install sgl-flash-mla, or keep the KV in the model's dtype",
            )

    def __call__(self, lens: torch.Tensor, rows: int, heads: int) -> Schedule:
        """A fresh schedule; `rows`: query tokens of a request times heads. Device work only."""
        if self._ahead is None:
            return self._new()[0], None
        tiles, splits = self._ahead(lens, rows, 1, heads, **self._options)
        if not self._objects:
            return tiles, splits
        made = self._new()[0]
        made.tile_scheduler_metadata, made.num_splits = tiles, splits
        return made, None

    def refresh(self, kept: Schedule, fresh: Schedule) -> None:
        """Values of `fresh` in the tensors of `kept`, whose addresses a graph has."""
        for old, new in zip(self._tensors(kept), self._tensors(fresh), strict=True):
            old.copy_(new)

    def _tensors(self, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        made, splits = schedule
        return (made.tile_scheduler_metadata, made.num_splits) if self._objects else (made, splits)


class FlashMLA(AttentionBackend):
    """Tables of 64-token pages, a schedule per step shared by all layers with one head count."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` without latents, `BackendBuildError` for a build without the kernel."""
        super().__init__(config)
        self._latents = Latents(config)
        library = importlib.import_module(_module_of(config))
        self._run = function_of(library, "flash_mla_with_kvcache", config.name)
        names = arguments_of(self._run, "q", "k_cache", "block_table", "cache_seqlens", backend=config.name)
        self._options: dict[str, Any] = {"is_fp8_kvcache": self._latents.fp8}
        if "use_legacy" in names:
            self._options["use_legacy"] = True
        if self._latents.fp8:
            arguments_of(self._run, "descale_q", "descale_k", backend=config.name)
            self._options["descale_q"] = torch.ones(1, dtype=torch.float32, device=self.pool.device)
        self._schedule = _Scheduler(library, self._latents.fp8, config.name)
        self._heads = tuple(dict.fromkeys(spec.num_q_heads for spec in self.pool.specs))

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the step's own tables. A schedule that the first layer makes can't be captured.

        Drafts need a bound on the host: with the number of tokens it says that all requests have as many.
        """
        base = super().traits(mode)
        need = HostLengthNeed.NONE if mode is ForwardMode.DECODE else HostLengthNeed.BOUND
        return replace(
            base,
            host_lengths=max(base.host_lengths, need),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            rounds_queries=self._latents.fp8,
            graph=base.graph if self._schedule.stable else GraphSupport.NEVER,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """The step's schedules: from the lengths on the device, nothing is read back.

        Raises:
            FeatureError: requests of different lengths.
        """
        plan.private = self._step(plan)

    def replan(self, plan: Plan) -> None:
        """The captured schedules keep their addresses and get this step's values."""
        for heads, schedule in self._step(plan).schedules.items():
            self._schedule.refresh(plan.private.schedules[heads], schedule)

    def _step(self, plan: Plan) -> _Step:
        each = require_uniform(plan, self.config.name)
        schedules = {heads: self._schedule(plan.seq_lens, each * heads, heads) for heads in self._heads}
        return _Step(each, schedules)

    def forward_decode(self, call: AttentionCall) -> None:
        """As a verification of one token."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Absorbed, always: the rows of this backend take no other queries."""
        step, layer, latents = call.plan.private, call.layer, self._latents
        assert call.table is not None
        options = self._options
        if latents.fp8:
            options = options | {"descale_k": self.pool.scales(layer.layer_id)[0].device}
        schedule, splits = step.schedules[layer.spec.num_q_heads]
        out, lse = self._run(
            latents.query(by_request(call.q, step.each)),
            latents.pages(layer.layer_id)[:, :, None],
            call.table.blocks,
            call.plan.seq_lens,
            layer.spec.v_head_dim,
            schedule,
            splits,
            softmax_scale=layer.spec.scale,
            causal=step.each > 1,
            **options,
        )
        call.out.copy_(out.view(call.out.shape))
        if call.lse is not None:
            by_request(call.lse, step.each).copy_(lse.transpose(1, 2))


def _module_of(config: BackendConfig) -> str:
    """The module of the distribution that serves; `flash_mla` where nobody says which does."""
    serving = None if config.provider is None else config.provider.distribution
    for provider in config.row.providers:
        if provider.distribution == serving and provider.modules:
            return _MODULES.get(provider.modules[0], provider.modules[0])
    return "flash_mla"
