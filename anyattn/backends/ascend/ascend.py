"""`ascend`: torch-npu on 910B and 910C (fused infer attention) and on 310P (ATB's paged operators).

One file for the contract; the calls of each chip are in `ascend_calls`, `ascend_fused` and `ascend_310p`.
Not run on an NPU: proven by schemas and emulation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from anyattn.backends.ascend.ascend_310p import PagedOperators
from anyattn.backends.ascend.ascend_calls import torch_npu
from anyattn.backends.ascend.ascend_fused import FusedInfer
from anyattn.catalog.architectures import ASCEND_310P
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.plan import Plan
from anyattn.core.traits import MixedSupport, SharedReadEnds, Traits
from anyattn.errors import PoolError

__all__ = ["Ascend", "seq_len_fill"]


def seq_len_fill(mode: ForwardMode, tokens_per_request: int) -> int:
    """Padded decode rows attend to nothing; drafts of padding need keys for a causal mask to align at."""
    return 0 if mode is ForwardMode.DECODE else tokens_per_request


class _Family(Protocol):
    """The operators of one chip."""

    def plan(self, plan: Plan, *, in_capture: bool) -> Any:
        """What the layers of a step pass, once for each plan group."""
        ...

    def replan(self, plan: Plan) -> None:
        """The same for a replay: lists change, tensors stay."""
        ...

    def run(self, call: AttentionCall) -> None:
        """One layer, in any mode."""
        ...


class Ascend(AttentionBackend):
    """Dense layers. Decode, prefill and mixed steps take their keys through block tables of 128 tokens."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for another pool, `BackendBuildError` without torch-npu or its operator."""
        super().__init__(config)
        pool = self.pool
        if not isinstance(pool, MHAPool) or pool.layout not in config.row.layouts:
            raise PoolError(
                "ascend reads MHA pools",
                asked=f"{type(pool).__name__} ({pool.layout})",
                allowed=f"MHAPool in {' or '.join(config.row.layouts)}",
                hint="anyattn.kv.create_pool(decision, num_slots=…)",
            )
        library = torch_npu(config.name)
        old = not set(ASCEND_310P).isdisjoint(config.row.architectures)
        build = PagedOperators if old else FusedInfer
        self.family: _Family = build(library, config, pool)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied into the step. Decode and extend rows go through one call."""
        return replace(
            super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY, mixed=MixedSupport.NATIVE
        )

    def get_cuda_graph_seq_len_fill_value(self, mode: ForwardMode, tokens_per_request: int) -> int:
        """0 for decode."""
        return seq_len_fill(mode, tokens_per_request)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Calls of every plan group, from host lengths."""
        plan.private = self.family.plan(plan, in_capture=in_capture)

    def replan(self, plan: Plan) -> None:
        """New lengths for the recorded calls."""
        self.family.replan(plan)

    def forward_decode(self, call: AttentionCall) -> None:
        """One query token a request."""
        self.family.run(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Any number of query tokens a request."""
        self.family.run(call)

    def forward_mixed(self, call: AttentionCall) -> None:
        """Prefill chunks and decode rows in one call: a decode row is a request of one query token."""
        self.family.run(call)
