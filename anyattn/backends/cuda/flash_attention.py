"""`fa3` and `fa4`: FlashAttention-3 and -4 over block tables, whoever ships them (`flash_providers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from anyattn.backends.cuda.flash_plan import FlashPlanner, FlashStep
from anyattn.backends.cuda.flash_providers import load_flash
from anyattn.backends.cuda.flash_tree import TreeTables, run_tree
from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.cuda.fused_writes import FusedWrites
from anyattn.catalog.architectures import SM90
from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.rows import aligned
from anyattn.core.spec import AttentionKind
from anyattn.core.state import AttentionState
from anyattn.core.traits import Determinism, KVRead, SharedReadEnds, Traits, TreeMaskMode
from anyattn.errors import FeatureError, PoolError

__all__ = ["FlashAttention", "FlashAttention3", "FlashAttention4", "split_count"]


def split_count(config: BackendConfig, version: int) -> int:
    """Parts that a request's keys are cut into: 1 for batch invariance, 0 = the library chooses.

    FlashAttention-4 has no split keys on SM90 (it asserts so in interface.py of 4.0.0b36).
    """
    whole = version == 4 and not set(SM90).isdisjoint(config.row.architectures)
    return 1 if whole or config.deterministic is Determinism.BATCH_INVARIANT else 0


@dataclass(frozen=True, eq=False, slots=True)
class _Layer:
    """A layer as it was first called. `group`: number of its plan group. `k`, `v`: `[pages, P, Hkv, D]`.

    `widest`: it has as many query heads as any of its group, so the group's schedule is its own.
    """

    layer: AttentionLayer
    group: int
    k: torch.Tensor
    v: torch.Tensor
    widest: bool
    cross: bool


class FlashAttention(FusedWrites):
    """Paged attention through page tables in every mode, ragged where a step's keys are all arguments.

    Batch-invariant on request: one split, always through the pool. Explicit masks: see `flash_tree`.
    Versions differ in names of arguments alone; a subclass says which one it is.
    """

    version: ClassVar[int]

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD, `LibraryError` or `FeatureError` for the build."""
        super().__init__(config)
        if not isinstance(self.pool, MHAPool) or self.pool.layout != "NHD":
            raise PoolError(
                f"{config.name} reads MHA pools", asked=f"{type(self.pool).__name__} ({self.pool.layout})",
                allowed="MHAPool (NHD)", hint="anyattn.kv.create_pool(decision, num_slots=…)",
            )  # fmt: skip
        self.library = load_flash(config.provider, self.version)
        self._check_build()
        self.planner = FlashPlanner(self.library, config, split_count(config, self.version))
        self._fp8, self._limit = is_fp8(self.pool.kv_dtype), torch.finfo(self.pool.kv_dtype).max
        self._layers: dict[int, _Layer] = {}
        self._trees = TreeTables(self.table)
        offer_filler(self.compiler, self.table)

    def _check_build(self) -> None:
        """Once, by signature: the build takes what the model's layers ask for."""
        names = self.library.paged.names
        for group in self.config.groups.plan_groups:
            for asked, name in ((group.sinks, "sinks"), (group.logit_cap is not None, "cap")):
                if asked and name not in names:
                    raise FeatureError(
                        f"this build of FlashAttention-{self.version} has no {name}",
                        asked=name,
                        allowed=", ".join(names),
                        hint="another distribution of it, or another backend",
                    )

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables, and the rows of explicit masks, are copied out of the request table in every step."""
        base = super().traits(mode)
        return Traits(
            host_lengths=base.host_lengths,
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            graph=base.graph,
            determinism=base.determinism,
            kv_read=KVRead.READ_BACK,
            ragged_verify=base.ragged_verify,
            tolerates_nan_tail=base.tolerates_nan_tail,
            tree_mask=TreeMaskMode.QLEN_ONLY,
            rounds_queries=self._fp8,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Arguments of every plan group, and storage for the rows of a mask."""
        step = plan.private = self.planner.step(plan, in_capture=in_capture)
        if plan.mask_cells is not None:
            step.tree = self._trees.prepare(plan, self.planner.longest_query(plan, in_capture))

    def renews(self, plan: Plan, batch: ForwardBatch) -> bool:
        """Calls follow from shapes and the table's width; the schedule is made in every step."""
        return True

    def replan(self, plan: Plan) -> None:
        """Nothing: what a graph was captured with bounds every batch of its shape."""

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, rows of masked queries, and the tile schedule, once for all layers of a plan group."""
        super().init_forward_metadata_in_graph(plan)
        step: FlashStep | None = plan.private
        if step is None:  # an idle step
            return
        if step.tree is not None:
            self._trees.fill(plan, step.tree)
        if step.planned:
            self.planner.fill(step, stable=plan.stable)

    def forward_decode(self, call: AttentionCall) -> None:
        """Paged, one query a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Paged through the group's table, or ragged over the step's own keys."""
        step: FlashStep = call.plan.private
        layer = self._layers.get(call.layer.layer_id)
        if layer is None or layer.layer is not call.layer:
            layer = self._layers[call.layer.layer_id] = self._known(call)
        planned = step.calls[layer.group]
        q, out, lse, rows = call.q, call.out, call.lse, step.rows
        if step.clear:
            out.zero_()
        if rows != q.shape[0]:
            q, out, lse = q[:rows], out[:rows], None if lse is None else lse[:rows]
        if not rows:
            return
        k, v = layer.k, layer.v
        if planned.fresh is not None and call.k is not None:
            planned = planned.fresh
        if planned.table is None:
            assert call.k is not None
            assert call.v is not None
            k, v = aligned(call.k[:rows]), aligned(call.v[:rows])
        elif self._fp8:
            q = q.clamp(-self._limit, self._limit).to(self.pool.kv_dtype)  # q, k and v have one dtype
        if step.tree is not None and not layer.cross:
            run_tree(call, step.tree, planned, q, k, v, out, lse, self.descales)
            return
        arguments = planned.scheduled if layer.widest else planned.arguments
        sinks = call.layer.sinks
        given = self.descales(call, call.plan.key.num_requests) if self._fp8 and planned.table else {}
        if sinks is not None and lse is None:
            given["sinks"] = sinks if self.library.sink_dtype is None else sinks.to(self.library.sink_dtype)
        whole = call.own_out and rows == call.q.shape[0]
        out = planned.function.run(q, k, v, arguments, out, lse, given, may_replace=whole)
        if whole:
            call.out = out
        if lse is not None:
            _finish(out, lse, sinks, exact=planned.causal)

    def _known(self, call: AttentionCall) -> _Layer:
        """What stays from step to step: caches in kernel pages, the group's place, whose schedule fits."""
        layer_id, group, pool = call.layer.layer_id, call.group, self.pool
        groups, page = self.config.groups, self.config.form.kernel_page
        assert isinstance(pool, MHAPool)
        k, v = pool.key_cache(layer_id), pool.value_cache(layer_id)
        return _Layer(
            call.layer,
            groups.plan_groups.index(group),
            k.view(-1, page, *k.shape[2:]),
            v.view(-1, page, *v.shape[2:]),
            call.layer.spec.num_q_heads == groups.max_q_heads[group],
            call.layer.spec.kind is AttentionKind.CROSS,
        )

    def descales(self, call: AttentionCall, requests: int) -> dict[str, torch.Tensor]:
        """`k_descale` and `v_descale`: views `[requests, Hkv]` of the pool's scales that aren't 1."""
        heads = call.group.num_kv_heads
        scales = zip(("k_descale", "v_descale"), self.pool.scales(call.layer.layer_id), strict=True)
        return {name: s.device.expand(requests, heads) for name, s in scales if not s.is_one}


def _finish(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, *, exact: bool) -> None:
    """`out` and `lse` of a call without sinks become the layer's; `exact`: every query has a key."""
    if not exact:
        lse.masked_fill_(torch.isposinf(lse), -torch.inf)  # how some builds mark a query without keys
    if sinks is not None:
        # Builds differ in whether their log-sum-exp counts sinks: ours is made of one that has none.
        state = AttentionState(out, lse).finalise(sinks)
        out.copy_(state.out)
        lse.copy_(state.lse)


class FlashAttention3(FlashAttention):
    """`fa3`: tokenspeed-fa3, sglang-kernel, sgl-kernel or vLLM's bundle."""

    version = 3


class FlashAttention4(FlashAttention):
    """`fa4`: flash-attn-4 or tokenspeed-fa4. Run in part on an H200 (docs/h200.md), elsewhere emulated."""

    version = 4
