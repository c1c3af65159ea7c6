"""`fa3` and `fa4`: FlashAttention-3 and -4 over block tables, whoever ships them (`flash_providers`)."""

from __future__ import annotations

from typing import ClassVar

import torch

from anyattn.backends.cuda.flash_plan import FlashPlanner, FlashStep, GroupCall, query_rows
from anyattn.backends.cuda.flash_providers import aligned, load_flash
from anyattn.backends.cuda.flash_tree import TreeTables, run_tree
from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.catalog.architectures import SM90
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.scales import KVScale, quantize
from anyattn.core.plan import Plan
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


class FlashAttention(AttentionBackend):
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
        self._fp8, self._unit = is_fp8(self.pool.kv_dtype), KVScale.of(1.0, 1, self.pool.device)
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
        rows = query_rows(plan, in_capture)
        step = plan.private = FlashStep(rows, in_capture and plan.key.mode is not ForwardMode.DECODE)
        step.calls = self.planner.calls(plan, in_capture=in_capture)
        if plan.mask_cells is not None:
            step.tree = self._trees.prepare(plan, stable=self._stable(plan))

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, rows of masked queries, and the tile schedule, once for all layers of a plan group."""
        super().init_forward_metadata_in_graph(plan)
        if plan.key.mode is ForwardMode.IDLE:
            return
        step: FlashStep = plan.private
        if step.tree is not None:
            self._trees.fill(plan, step.tree)
        self.planner.fill(step, stable=self._stable(plan))

    def _stable(self, plan: Plan) -> bool:
        """What the step adds lives where the compiler's tensors do: a split prefill's outlives other steps."""
        return self._buffers is not None and plan.key.mode is not ForwardMode.SPLIT_PREFILL

    def forward_decode(self, call: AttentionCall) -> None:
        """Paged, one query a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Paged through the group's table, or ragged over the step's own keys."""
        step: FlashStep = call.plan.private
        planned = step.calls[call.group]
        if planned.fresh is not None and call.k is not None:
            planned = planned.fresh
        q, out, lse = call.q, call.out, call.lse
        if step.clear:
            out.zero_()
        if step.rows is not None and step.rows != q.shape[0]:
            q, out = q[: step.rows], out[: step.rows]
            lse = None if lse is None else lse[: step.rows]
        if not q.shape[0]:
            return
        k, v = self._keys(call, planned, q.shape[0])
        if self._fp8 and planned.table is not None:
            q = quantize(q, self._unit, self.pool.kv_dtype)  # q, k and v have one dtype
        if step.tree is not None and call.layer.spec.kind is not AttentionKind.CROSS:
            run_tree(call, step.tree, planned, q, k, v, out, lse, self.descales)
        else:
            self._attend(call, planned, q, k, v, out, lse)

    def _attend(
        self, call: AttentionCall, planned: GroupCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        scheduled = planned.scheduled if q.shape[1] == planned.heads else None
        given: dict[str, torch.Tensor | None] = {}
        if self._fp8 and planned.table is not None:
            given = self.descales(call, call.plan.key.num_requests)
        sinks = call.layer.sinks
        if sinks is not None and lse is None:
            given["sinks"] = sinks if self.library.sink_dtype is None else sinks.to(self.library.sink_dtype)
        planned.function.run(q, k, v, scheduled or planned.arguments, out, lse, **given)
        if lse is None:
            return
        if not planned.causal:
            lse.masked_fill_(torch.isposinf(lse), -torch.inf)  # how some builds mark a query without keys
        if sinks is not None:
            # Builds differ in whether their log-sum-exp counts sinks: ours is made of one that has none.
            state = AttentionState(out, lse).finalise(sinks)
            out.copy_(state.out)
            lse.copy_(state.lse)

    def _keys(self, call: AttentionCall, planned: GroupCall, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's own keys, or the layer's caches in kernel pages `[pages, P, Hkv, D]`."""
        if planned.table is None:
            assert call.k is not None
            assert call.v is not None
            return aligned(call.k[:rows]), aligned(call.v[:rows])
        layer_id = call.layer.layer_id
        caches = self._caches.get(layer_id)
        if caches is None:
            pool, page = self.pool, self.config.form.kernel_page
            assert isinstance(pool, MHAPool)
            k, v = pool.key_cache(layer_id), pool.value_cache(layer_id)
            caches = k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:])
            self._caches[layer_id] = caches
        return caches

    def descales(self, call: AttentionCall, requests: int) -> dict[str, torch.Tensor | None]:
        """`k_descale` and `v_descale`: views `[requests, Hkv]` of the pool's scales that aren't 1."""
        heads = call.group.num_kv_heads
        scales = zip(("k_descale", "v_descale"), self.pool.scales(call.layer.layer_id), strict=True)
        return {name: s.device.expand(requests, heads) for name, s in scales if not s.is_one}


class FlashAttention3(FlashAttention):
    """`fa3`: tokenspeed-fa3, sglang-kernel, sgl-kernel or vLLM's bundle."""

    version = 3


class FlashAttention4(FlashAttention):
    """`fa4`: flash-attn-4 or tokenspeed-fa4. Its calls are checked by emulation only."""

    version = 4
