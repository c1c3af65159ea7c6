"""`HybridBackend`: one backend for prefill, another for decode, on one pool."""

from __future__ import annotations

from typing import Literal

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.call import LayerInputs, LayerOutput
from anyattn.core.contract import AttentionBackend, StepBackend
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.spec import Limits
from anyattn.core.traits import Traits
from anyattn.core.wrappers.shape_router import ShapeRouter
from anyattn.errors import ConfigError

__all__ = ["Child", "HybridBackend", "VerifyRoute"]

VerifyRoute = Literal["prefill", "decode"]
Child = AttentionBackend | ShapeRouter
"""Who may serve a mode."""


class HybridBackend(StepBackend):
    """Routes each mode to one child; a plan of the hybrid *is* the child's plan.

    DECODE and IDLE go to `decode`, TARGET_VERIFY to `verify` (one of the two by name, or a third
    backend), DRAFT_EXTEND to `draft` and MIXED to `mixed` where there is one, all else to `prefill`.
    """

    def __init__(
        self,
        prefill: Child,
        decode: Child,
        verify: VerifyRoute | Child = "prefill",
        draft: Child | None = None,
        mixed: Child | None = None,
    ) -> None:
        """Raises `ConfigError` if the children don't share one pool and request table."""
        if isinstance(verify, str) and verify not in ("prefill", "decode"):
            raise ConfigError("verify route", asked=verify, allowed="prefill, decode, or a backend")
        if isinstance(verify, str):
            verify = decode if verify == "decode" else prefill
        self.prefill, self.decode, self.verify, self.draft = prefill, decode, verify, draft or prefill
        self.mixed = mixed or prefill
        distinct = tuple(dict.fromkeys((prefill, decode, verify, self.draft, self.mixed)))
        self.children = distinct
        if any(c.pool is not prefill.pool or c.table is not prefill.table for c in distinct):
            raise ConfigError("the backends of a hybrid share one pool and one request table")
        self.pool, self.table = prefill.pool, prefill.table

    def child(self, mode: ForwardMode) -> Child:
        """The child that serves `mode`."""
        if mode in (ForwardMode.DECODE, ForwardMode.IDLE):
            return self.decode
        if mode is ForwardMode.TARGET_VERIFY:
            return self.verify
        if mode is ForwardMode.MIXED:
            return self.mixed
        return self.draft if mode is ForwardMode.DRAFT_EXTEND else self.prefill

    def routes(self, mode: ForwardMode) -> tuple[str, ...]:
        """Those of the child that serves `mode`."""
        return self.child(mode).routes(mode)

    def route_of(self, batch: ForwardBatch) -> str:
        """The serving child's."""
        return self.child(batch.forward_mode).route_of(batch)

    def routed(self, mode: ForwardMode, route: str) -> StepBackend:
        """The serving child, or who it routes to."""
        return self.child(mode).routed(mode, route)

    def traits(self, mode: ForwardMode) -> Traits:
        """Exactly those of the child that serves `mode`."""
        return Traits.combine([self.child(mode).traits(mode)])

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Eager, by the child that serves the batch's mode."""
        return self.child(batch.forward_mode).init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, *, in_capture: bool = False, captured: Plan | None = None
    ) -> Plan:
        """Host half, by the same child."""
        child = self.child(batch.forward_mode)
        return child.init_forward_metadata_out_graph(batch, in_capture=in_capture, captured=captured)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Device half, by the same child."""
        self.child(plan.key.mode).init_forward_metadata_in_graph(plan)

    def init_cuda_graph_state(self, limits: Limits) -> None:
        """All children: any may serve captured modes."""
        for child in self.children:
            child.init_cuda_graph_state(limits)

    def get_cuda_graph_seq_len_fill_value(self, mode: ForwardMode, tokens_per_request: int) -> int:
        """The serving child's."""
        return self.child(mode).get_cuda_graph_seq_len_fill_value(mode, tokens_per_request)

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Plan:
        """By the prefill child: segments read the same vectors in every mode."""
        return self.prefill.init_forward_metadata_for_breakable_cuda_graph_capture(batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Plan, batch: ForwardBatch
    ) -> None:
        """By the same child."""
        self.prefill.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, batch)

    def commit(self, batch: ForwardBatch, accepted_lens: torch.Tensor) -> None:
        """To the child that verified."""
        self.child(batch.forward_mode).commit(batch, accepted_lens)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        inputs: LayerInputs | None = None,
        plan: Plan,
    ) -> LayerOutput:
        """The serving child's `forward`, with its own plan."""
        return self.child(batch.forward_mode).forward(
            q, k, v, layer, batch,
            save_kv_cache=save_kv_cache, return_lse=return_lse, out=out, lse_out=lse_out, inputs=inputs,
            plan=plan,
        )  # fmt: skip
