"""`flashinfer` for latent layers: its MLA wrapper over paged latents, its ragged wrapper for expanded keys.

Read in FlashInfer 0.6.12 and 0.7.2. 0.7 plans from `metadata=` and fixes the base of the log-sum-exp there;
0.6 takes flat arrays and is asked in `run`. The wrapper runs on latents and rope parts as views of one pool.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from anyattn.backends.cuda.flashinfer_latent import WORKSPACE_BYTES, BlockTableDecode
from anyattn.backends.cuda.flashinfer_lender import Lender, Slot
from anyattn.backends.cuda.latents import LN2, Latents, function_of
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan, TableKind
from anyattn.core.rows import dense
from anyattn.core.spec import AttentionSpec
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import PlanError

__all__ = ["FlashInferMLA"]


@dataclass(frozen=True)
class _Unit:
    """What a wrapper is planned for: layers of one plan group and one head count (`spec` is one of them)."""

    group: PlanGroup
    spec: AttentionSpec


@dataclass(eq=False)
class _Step:
    """`Plan.private`, by unit: the planned wrapper, and room for a log-sum-exp that nobody asked for;
    materialised: a wrapper for each part of the keys, and the tokens that see none of them. `slots` are a
    captured plan's own wrappers, planned again before each replay. `rows`: tokens of all requests.
    """

    rows: int

    runs: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    ragged: list[dict[KeyPart, Any]] = field(default_factory=list)
    blind: dict[KeyPart, torch.Tensor] = field(default_factory=dict)


class FlashInferMLA(AttentionBackend):
    """One inner kernel, named by the row (`fa3`, `fa2`, or `xqa`, which is planned nowhere)."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents, `BackendBuildError` for another FlashInfer."""
        super().__init__(config)
        self._latents = Latents(config)
        device = self.pool.device
        self._units: list[_Unit] = []
        self._unit_of = [self._unit(spec) for spec in self.pool.specs]
        self._xqa: BlockTableDecode | None = None
        if config.form.kind is TableKind.BLOCK_TABLE:
            self._xqa = BlockTableDecode(config.name, "xqa", self._latents, device)
            return
        self._inner = config.row.method.split()[0]
        mla = importlib.import_module("flashinfer.mla")
        prefill = importlib.import_module("flashinfer.prefill")
        self._new = function_of(mla, "BatchMLAPagedAttentionWrapper", config.name)
        ragged = function_of(prefill, "BatchPrefillWithRaggedKVCacheWrapper", config.name)
        self._metadata = getattr(mla, "MLAPlanMetadata", None)
        self._natural = "return_lse_base_on_e" in _parameters(self._new, "run")
        if "metadata" not in _parameters(self._new, "plan"):
            self._metadata = None
        self._ragged_options = {"lse_base": "ln"} if "lse_base" in _parameters(ragged, "run") else {}
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = Lender(partial(self._new, self._workspace, backend=self._inner), device)
        self._ragged_wrappers = Lender(partial(ragged, self._workspace, "NHD", backend=self._inner), device)

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the step's own tables."""
        base = super().traits(mode)
        rounds = self._xqa is not None and self._latents.fp8
        return replace(base, shared_read_ends=SharedReadEnds.IN_REPLAY, rounds_queries=rounds)

    # -- planning ------------------------------------------------------------------------------------

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Once a step for each unit, from arrays on the host: nothing is copied back.

        Raises:
            PlanError: a step that FlashInfer won't plan.
        """
        if self._xqa is not None:
            plan.private = self.config.limits.max_context if in_capture else max(1, plan.max_kv_len)
            return
        queries = _offsets(plan)
        step = _Step(int(queries[-1]))
        plan.private = step
        if plan.mla_keys is not None:
            self._plan_ragged(plan, step, queries)
            return
        for unit in self._units:
            call = partial(self._plan, unit, plan, queries)
            if in_capture:
                step.slots.append(Slot.of(self._graph_wrapper(unit, plan), self.pool.device))
                wrapper = step.slots[-1].plan(call)
            else:
                wrapper = self._wrappers.plan(step, call)
            shape = plan.key.num_tokens, unit.spec.num_q_heads
            step.runs.append((wrapper, torch.empty(shape, dtype=torch.float32, device=self.pool.device)))

    def replan(self, plan: Plan) -> None:
        """The captured wrappers are planned again in their own buffers."""
        if self._xqa is None:
            queries = _offsets(plan)
            for unit, slot in zip(self._units, plan.private.slots, strict=True):
                slot.plan(partial(self._plan, unit, plan, queries))

    def _plan(self, unit: _Unit, plan: Plan, queries: torch.Tensor, wrapper: Any) -> None:
        table = plan.tables[unit.group.table]
        host, (_, indices) = table.host, table.csr
        assert host is not None
        causal, heads = plan.max_q_len > 1, unit.spec.num_q_heads
        _check_tiles(plan, heads, causal)
        arrays = queries, host.indptr, indices, host.kv_lens
        sizes: dict[str, Any] = {
            "num_heads": heads,
            "head_dim_ckv": unit.group.v_head_dim,
            "head_dim_kpe": unit.group.head_dim - unit.group.v_head_dim,
            "page_size": self.config.form.kernel_page,
            "causal": causal,
            "sm_scale": unit.group.scale,
            "q_data_type": self.config.dtype,
            "kv_data_type": self.pool.kv_dtype,
        }
        try:
            if self._metadata is not None:
                wrapper.plan(metadata=self._metadata.csr(*arrays), lse_mode="basee", **sizes)
            else:
                wrapper.plan(*arrays, **sizes)
        except ValueError as error:
            raise PlanError(
                f"FlashInfer doesn't plan this {plan.key.mode.value} step",
                asked=f"{plan.key.num_requests} requests, {plan.key.num_tokens} tokens, {heads} heads",
                allowed=str(error),
                hint="split the batch, or choose another backend for this phase",
            ) from error

    def _graph_wrapper(self, unit: _Unit, plan: Plan) -> Any:
        """Over offsets of its own, and over the pages of the plan's table where they lie."""
        device, requests = self.pool.device, plan.key.num_requests
        _, indices = plan.tables[unit.group.table].csr
        return self._new(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            kv_indptr=torch.zeros(requests + 1, dtype=torch.int32, device=device),
            kv_indices=indices,
            kv_len_arr=torch.zeros(requests, dtype=torch.int32, device=device),
            backend=self._inner,
        )

    def _plan_ragged(self, plan: Plan, step: _Step, queries: torch.Tensor) -> None:
        assert plan.mla_keys is not None
        parts = (plan.mla_keys.new, *plan.mla_keys.prefix)
        for unit in self._units:
            spec, wrappers = materialised_spec(unit.spec), {}
            for part in parts:
                arguments = {
                    "kv_indptr": torch.tensor(part.bounds, dtype=torch.int32, device="cpu"),
                    "num_qo_heads": spec.num_q_heads,
                    "num_kv_heads": spec.num_kv_heads,
                    "head_dim_qk": spec.head_dim,
                    "head_dim_vo": spec.v_head_dim,
                    "causal": part is plan.mla_keys.new,
                    "sm_scale": spec.scale,
                    "q_data_type": self.config.dtype,
                    "kv_data_type": self.config.dtype,
                }

                call = partial(_plan_ragged, queries, arguments)
                wrappers[part] = self._ragged_wrappers.plan(step, call)
            step.ragged.append(wrappers)
        assert plan.host_extend_lens is not None
        for part in parts:
            blind = [q for q, k in zip(plan.host_extend_lens, part.lens, strict=True) if not k]
            if any(blind):
                step.blind[part] = _blind(plan, part).to(self.pool.device, non_blocking=True)

    # -- compute -------------------------------------------------------------------------------------

    def forward_decode(self, call: AttentionCall) -> None:
        """One query token a request."""
        if self._xqa is not None:
            self._xqa(call, call.plan.seq_lens, 1, call.plan.private)
            return
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        method = call.plan.mla_method
        if method is not None and method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        layer_id = call.layer.layer_id
        wrapper, scratch = call.plan.private.runs[self._unit_of[layer_id]]
        lse = scratch if call.lse is None else call.lse
        q, cache = dense(call.q), self._latents.pages(layer_id)
        options: dict[str, Any] = {"out": call.out, "lse": lse, "return_lse": True}
        if self._natural:
            options["return_lse_base_on_e"] = True
        if self._latents.fp8:
            scale = self._latents.scale(layer_id)
            options |= {"ckv_scale": scale, "kpe_scale": scale}
        if self._metadata is not None:
            wrapper.run(query=q, kv_cache=cache, **options)
            return
        rank = call.out.shape[2]
        wrapper.run(q[..., :rank], q[..., rank:], cache[..., :rank], cache[..., rank:], **options)
        if not self._natural and call.lse is not None:
            call.lse.mul_(LN2)

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
        """`causal` is in the part's plan. Tokens without keys are set here: kernels differ in them."""
        step: _Step = call.plan.private
        wrapper = step.ragged[self._unit_of[call.layer.layer_id]][part]
        q, out = (
            dense(call.q[: step.rows]),
            out[: step.rows],
        )  # `run` takes no rows behind the last request
        direct = out if out.dtype == self.config.dtype else None
        if lse is None:
            result = wrapper.run(q, k, v, out=direct)
        else:
            lse = lse[: step.rows]
            result, _ = wrapper.run(q, k, v, out=direct, lse=lse, return_lse=True, **self._ragged_options)
            if not self._ragged_options:
                lse.mul_(LN2)
        if direct is None:
            out.copy_(result)
        blind = step.blind.get(part)
        if blind is not None:
            out.masked_fill_(blind[:, None, None], 0)
            if lse is not None:
                lse.masked_fill_(blind[:, None], -torch.inf)

    def _unit(self, spec: AttentionSpec) -> int:
        """Its number; layers that one wrapper serves have the same."""
        group = self.config.groups.locate(PlanGroup.of(spec))
        for index, known in enumerate(self._units):
            if (known.group, known.spec.num_q_heads, known.spec.mla) == (group, spec.num_q_heads, spec.mla):
                return index
        self._units.append(_Unit(group, spec))
        return len(self._units) - 1


def _parameters(cls: Callable[..., Any], method: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(cls, method)).parameters)


def _plan_ragged(queries: torch.Tensor, arguments: dict[str, Any], wrapper: Any) -> None:
    wrapper.plan(queries, **arguments)


def _offsets(plan: Plan) -> torch.Tensor:
    """Of the queries: int32 `[B + 1]` on the host."""
    assert plan.batch.exact is not None
    lens = plan.batch.exact.extend_lens
    offsets = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(lens, 0, dtype=torch.int32, out=offsets[1:])
    return offsets


def _check_tiles(plan: Plan, heads: int, causal: bool) -> None:
    """Tiles of 64 rows (128 from 64 rows a request on) must hold whole tokens in a causal step.

    Else the kernels miss the last key of the token that a tile cuts (`_fa_common.py` of 0.7.2, which refuses
    the lengths where that happens; 0.6 doesn't look).

    Raises:
        PlanError: they don't.
    """
    rows = plan.key.num_tokens * heads // max(1, plan.key.num_requests)
    tile = 128 if rows > 64 else 64
    if causal and tile % heads:
        raise PlanError(
            "FlashInfer's causal MLA kernels cut a token into two tiles here",
            asked=f"{heads} heads, {rows} rows a request on average",
            allowed=f"heads that divide {tile}",
            hint="leave requests without new tokens out of the batch, or choose another backend",
        )


def _blind(plan: Plan, part: KeyPart) -> torch.Tensor:
    """bool on the host, one for each token of a request: it has no keys in this part."""
    assert plan.batch.exact is not None
    blind = torch.tensor([not n for n in part.lens], device="cpu")
    return torch.repeat_interleave(blind, plan.batch.exact.extend_lens)
