"""Work lists of AITER's persistent MLA decode, made on the device once a step and head count.

Both builds' `get_mla_metadata_v1` are served: they differ in the order of arguments and in names, so each
argument is passed by the name that the signature has.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.backends.rocm.aiter_library import library_function, optional
from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.plan import Plan, Table

__all__ = ["Work", "WorkPlanner", "has_work_lists"]

_HEADS = 16
"""Heads of a group that the persistent kernels of both builds and chips know."""
_LONGEST = 4
"""Query tokens of a request that they know."""


def has_work_lists() -> bool:
    """The installed build has the persistent kernel's planner; without it the plain kernels run."""
    return hasattr(importlib.import_module("aiter.ops.attention"), "get_mla_metadata_v1")


@dataclass(frozen=True, eq=False)
class Work:
    """Six tensors, by the names that `mla_decode_fwd` gives them."""

    arguments: dict[str, torch.Tensor]


class WorkPlanner:
    """Room for work lists at fixed addresses where a graph reads them, and the call that fills them."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` for lists of a kind that isn't known here."""
        module, name = "aiter.ops.attention", config.name
        self._sizes = library_function(name, module, "get_mla_metadata_info_v1", "is_sparse")
        self._make = library_function(name, module, "get_mla_metadata_v1", "reduce_partial_map")
        self._device, self._kv_dtype = config.pool.device, config.pool.kv_dtype
        self._q_dtype = self._kv_dtype if is_fp8(self._kv_dtype) else config.dtype
        self._dtypes = optional(self._make, dtype_q=self._q_dtype, dtype_kv=self._kv_dtype)
        self._held: dict[tuple[int, int, int], Work] = {}

    @staticmethod
    def serves(heads: int, each: int) -> bool:
        """The persistent kernel runs `each` tokens a request of so many heads."""
        return heads == _HEADS and each <= _LONGEST

    def room(self, plan: Plan, heads: int, each: int) -> Work:
        """Memory of a step's lists; a shape's own where a graph may have recorded it."""
        key = plan.key.num_requests, heads, each
        if plan.stable and key in self._held:
            return self._held[key]
        shapes = self._sizes(
            key[0], each, heads, self._q_dtype, self._kv_dtype, is_sparse=False, fast_mode=True
        )
        names = (
            "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map",
            "reduce_partial_map",
        )  # fmt: skip
        work = Work(
            {
                name: torch.empty(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in zip(names, shapes, strict=True)
            }
        )
        if plan.stable:
            self._held[key] = work
        return work

    def fill(self, plan: Plan, table: Table, heads: int, each: int, work: Work) -> None:  # anyattn: in-graph
        """Share the table's keys out; device work of static shape."""
        lists: dict[str, Any] = dict(work.arguments)
        lists["work_metadata_ptrs"] = lists.pop("work_meta_data")
        info = lists.pop("work_info_set")
        self._make(
            seqlens_qo_indptr=plan.query_offsets,
            seqlens_kv_indptr=table.csr[0],
            num_heads_per_head_k=heads,
            num_heads_k=1,
            is_causal=True,
            max_seqlen_qo=each,
            uni_seqlen_qo=each,
            fast_mode=True,
            **lists,
            **optional(
                self._make,
                work_info=info,
                work_info_set=info,
                kv_last_page_lens=table.last_page_len,
                page_size=1,
            ),
            **self._dtypes,
        )
