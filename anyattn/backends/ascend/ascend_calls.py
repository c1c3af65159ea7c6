"""Calls of torch-npu's fused infer attention, made once a step for each plan group.

Argument names and conventions: schemas and documents of torch-npu 2.13.0 (`npu_fused_infer_attention_score`
and its `_v2`), and the calls of vllm-ascend and SGLang. Lengths are lists on the host; TND counts query
tokens cumulatively without a leading 0, keys per request where there is a block table and cumulatively where
there is none; BSND and BNSD count per request. Proven by schema and emulation, not on an NPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyattn.core.graph.host_arguments import note_host_arguments
from anyattn.errors import BackendBuildError

__all__ = ["MASK_SIZE", "FusedCall", "Operator", "causal_mask", "cumulative", "fused_operator", "torch_npu"]

MASK_SIZE = 2048
"""Rows and columns of the one compressed mask that causal and band modes share."""

NO_MASK, CAUSAL, BAND = 0, 3, 4
"""`sparse_mode`: everything, causal aligned at the last key, a band aligned at the last key."""


@dataclass(frozen=True)
class Operator:
    """One version of the operator, and what it calls its arguments."""

    function: Callable[..., Any]
    heads: str
    scale: str
    q_lens: str
    kv_lens: str
    lse: str


def torch_npu(backend: str) -> Any:
    """The library. Its import fails in many ways without CANN: all become one error.

    Raises:
        BackendBuildError: it can't be imported.
    """
    try:
        import torch_npu as found  # type: ignore[import-not-found, unused-ignore]
    except Exception as error:  # OSError of a missing libhccl.so among others
        raise BackendBuildError(
            f"{backend} needs torch-npu",
            asked=f"{type(error).__name__}: {error}",
            allowed="torch-npu for this torch, with the CANN toolkit's set_env.sh sourced",
            hint="`anyattn doctor` says what is missing",
        ) from error
    return found


def fused_operator(library: Any, version: int, backend: str) -> Operator:
    """`npu_fused_infer_attention_score` (1) or `…_v2` (2).

    Raises:
        BackendBuildError: the installed torch-npu has none.
    """
    name = "npu_fused_infer_attention_score" + ("_v2" if version == 2 else "")
    function = getattr(library, name, None)
    if function is None:
        raise BackendBuildError(
            f"{backend} needs torch_npu.{name}",
            asked=f"torch-npu {getattr(library, '__version__', '')}".strip(),
            allowed="torch-npu 2.13 or later" if version == 2 else "torch-npu 2.10 or later",
            hint="`anyattn doctor` says which versions serve",
        )
    if version == 1:
        return Operator(
            function, "num_heads", "scale", "actual_seq_lengths", "actual_seq_lengths_kv", "softmax_lse_flag"
        )
    names = ("num_query_heads", "softmax_scale", "actual_seq_qlen", "actual_seq_kvlen", "return_softmax_lse")
    return Operator(function, *names)


def causal_mask(device: torch.device) -> torch.Tensor:
    """int8 `[2048, 2048]`, 1 above the diagonal = hidden: for causal and band modes alike."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device).triu_(1)


def cumulative(lens: Sequence[int]) -> list[int]:
    """Running sums without a leading 0."""
    return list(itertools.accumulate(lens))


def sparsity(causal: bool, window: int | None, mask: torch.Tensor) -> dict[str, Any]:
    """Arguments that say which keys a query sees.

    A band of W keys is `pre_tokens = W - 1`: so the documents' sample mask and SGLang; vllm-ascend passes W.
    Nobody has measured it here.
    """
    if window is not None:
        return {"sparse_mode": BAND, "atten_mask": mask, "pre_tokens": window - 1, "next_tokens": 0}
    return {"sparse_mode": CAUSAL, "atten_mask": mask} if causal else {"sparse_mode": NO_MASK}


@dataclass(eq=False)
class FusedCall:
    """What every layer of a plan group passes in a step.

    Attributes:
        layout: TND (`[T, Hq, D]`), or BSND / BNSD with one query token a request.
        arguments: keyword arguments, lengths included.
        bound: the same with a layer's own, by head count and whether it wants the log-sum-exp.
    """

    operator: Operator
    layout: str
    arguments: dict[str, Any]
    bound: dict[tuple[int, bool], dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(
        operator: Operator,
        layout: str,
        scale: float,
        num_kv_heads: int | None,
        q_lens: Sequence[int] | None,
        kv_lens: Sequence[int],
        **more: Any,
    ) -> FusedCall:
        """`q_lens`, `kv_lens` as the layout counts them; no q_lens where each request has one query token."""
        arguments = {"input_layout": layout, operator.scale: scale, operator.kv_lens: list(kv_lens), **more}
        if num_kv_heads is not None:
            arguments["num_key_value_heads"] = num_kv_heads
        if q_lens is not None:
            arguments[operator.q_lens] = list(q_lens)
        return FusedCall(operator, layout, arguments)

    def lengths(self) -> Mapping[str, Sequence[int]]:
        """Host lists by argument name, as they are now."""
        names = (self.operator.q_lens, self.operator.kv_lens)
        return {name: self.arguments[name] for name in names if name in self.arguments}

    def update(self, fresh: FusedCall) -> None:
        """Take the lengths of another step of the same shape; a recorded call keeps pointing here."""
        self.arguments.update(fresh.lengths())
        self.bound.clear()

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        **given: Any,
    ) -> None:
        """`q [T, Hq, D]`; writes `out [T, Hq, Dv]` and `lse [T, Hq]` (natural logarithm, as ours)."""
        operator, heads, wants_lse = self.operator, q.shape[1], lse is not None
        arguments = self.bound.get((heads, wants_lse))
        if arguments is None:
            arguments = {**self.arguments, operator.heads: heads, operator.lse: wants_lse}
            self.bound[heads, wants_lse] = arguments
        note_host_arguments(self.lengths)
        made, sums = operator.function(self.shaped(q.contiguous()), k, v, **arguments, **given)
        out.copy_(made.view(out.shape))
        if lse is not None:
            lse.copy_(sums.view(lse.shape))

    def shaped(self, q: torch.Tensor) -> torch.Tensor:
        """`[T, H, D]` in the call's layout, a view."""
        if self.layout == "TND":
            return q
        return q[:, None] if self.layout == "BSND" else q[:, :, None]
