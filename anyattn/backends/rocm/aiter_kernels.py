"""AITER's dense kernels, one class each: what a step plans for it and how a layer calls it.

Conventions read in csrc/cpp_itfs/pa/pa_kernels.cuh, csrc/py_itfs_ck/mha_batch_prefill_kernels.cu,
csrc/py_itfs_cu/asm_pa.cu, aiter/ops/mha.py and aiter/ops/triton/unified_attention.py of both builds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from anyattn.backends.rocm.aiter_layers import Layer, Scratch, dense_heads, dense_rows
from anyattn.backends.rocm.aiter_library import library_function, names_of, unified_attention, varlen_function
from anyattn.core.backend_config import BackendConfig
from anyattn.core.call import AttentionCall
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.plan import Plan, Table
from anyattn.core.strategy import Strategy

__all__ = ["KERNELS", "BatchPrefill", "Gathered", "Kernel", "PagedAsm", "PagedDecode", "Step", "Unified"]

_PARTITION = 256
"""Keys that one workgroup of `paged_attention_v1` reduces."""


@dataclass(eq=False)
class Step:
    """`Plan.private`: bounds of query and KV tokens of a request, in host numbers.

    Attributes:
        clear: rows behind the last request are written by nobody and must be finite.
        scratch: partial results.
    """

    longest: int
    bound: int
    clear: bool = False
    scratch: torch.Tensor | None = None


class Kernel(ABC):
    """One kernel family of AITER."""

    strategies: tuple[Strategy, ...] = (Strategy.PAGED,)

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` where the installed build lacks it."""
        self.config, self.name = config, config.name
        pool = config.pool
        assert isinstance(pool, MHAPool)
        self.pool, self.page = pool, config.form.kernel_page
        self.fp8 = is_fp8(pool.kv_dtype)

    def plan(self, plan: Plan, step: Step) -> None:  # noqa: B027
        """Host planning of its own; default: none."""

    @abstractmethod
    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """Write `call.out`, and `call.lse` where the kernel has one."""


class PagedDecode(Kernel):
    """`paged_attention_v1`: HIP, one query a request, block tables over `[N, P, Hkv, D]`."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` for a build that knows no window."""
        super().__init__(config)
        # `aiter.paged_attn` has another function of this name.
        self._run = library_function(self.name, "aiter.ops.attention", "paged_attention_v1", "sliding_window")
        self._scratch = Scratch(self.pool.device)
        self._kind = "fp8" if self.fp8 else "auto"
        sizes = [
            heads * (8 + group.v_head_dim * config.dtype.itemsize)
            for group, heads in config.groups.max_q_heads.items()
        ]
        self._row_bytes = max(sizes)

    def plan(self, plan: Plan, step: Step) -> None:
        """Room for exponent sums, maxima and partial outputs of every partition."""
        partitions = -(-step.bound // _PARTITION)
        nbytes = plan.key.num_requests * partitions * self._row_bytes
        step.scratch = self._scratch.take(nbytes, stable=plan.stable)

    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """Its window counts keys with the query's own; 0 = none."""
        table, out = _table(call), dense_rows(call.out)
        self._run(
            out=out, workspace_buffer=step.scratch, query=dense_heads(layer.query(call.q)), key_cache=layer.k,
            value_cache=layer.v, scale=layer.scale, block_tables=table.blocks, cu_query_lens=None,
            context_lens=table.kv_lens, max_context_len=_reach(table, step), alibi_slopes=None,
            kv_cache_dtype=self._kind, kv_cache_layout="NHD", logits_soft_cap=layer.cap,
            k_scale=layer.k_scale, v_scale=layer.v_scale, partition_size=_PARTITION,
            sliding_window=layer.window or 0,
        )  # fmt: skip
        layer.finish(out, call.out)


class PagedAsm(Kernel):
    """`pa_fwd_asm`: hand-written, D 128, 1/sqrt(128) built in, 5-D vectorised cache with pages of 16."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` without it."""
        super().__init__(config)
        self._run = library_function(self.name, "aiter.ops.attention", "pa_fwd_asm", "block_tables_stride0")

    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """No window, cap or scales: its rows refuse them."""
        table, out = _table(call), dense_rows(call.out)
        blocks = table.blocks
        self._run(dense_heads(call.q), layer.k, layer.v, blocks, table.kv_lens, blocks.stride(0), out_=out)
        layer.finish(out, call.out)


class Unified(Kernel):
    """Triton `unified_attention`: decode and extend in one kernel, causal, sinks, any head size."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` for a build without sinks."""
        super().__init__(config)
        self._run = unified_attention(self.name, "sinks")

    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """By keywords: main has put `q_scales` before `alibi_slopes`."""
        table = _table(call)
        q = layer.query(call.q)
        descales = (layer.k_scale, layer.v_scale) if self.fp8 else (None, None)
        self._run(
            q=q if q.stride(2) == 1 else q.contiguous(), k=layer.k, v=layer.v, out=call.out,
            cu_seqlens_q=call.plan.query_offsets, max_seqlen_q=step.longest, seqused_k=table.kv_lens,
            max_seqlen_k=_reach(table, step), softmax_scale=layer.scale, causal=True, window_size=layer.sides,
            block_table=table.blocks, softcap=layer.cap, q_descale=None, k_descale=descales[0],
            v_descale=descales[1], sinks=layer.layer.sinks,
        )  # fmt: skip
        layer.finish(call.out, call.out)


class BatchPrefill(Kernel):
    """`mha_batch_prefill_func`: CK over flat indices, of slots (token-major pools) or of pages (5-D)."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` for a build that can't read 8 bits or whole pages."""
        super().__init__(config)
        needed = [*(("q_descale", "k_descale", "v_descale") if self.fp8 else ())]
        needed += ["kv_last_page_lens"] if self.page > 1 else []
        self._run = library_function(self.name, "aiter.ops.mha", "mha_batch_prefill_func", *needed)
        self._last_pages = "kv_last_page_lens" in names_of(self._run)
        self._limit = torch.finfo(self.pool.kv_dtype).max
        self._one = torch.ones(1, dtype=torch.float32, device=self.pool.device)

    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """8-bit KV is read with 8-bit queries, and its output is bf16 whatever the model's dtype."""
        table = _table(call)
        indptr, indices = table.csr
        q = layer.query(call.q)
        more: dict[str, torch.Tensor | None] = {}
        out: torch.Tensor | None = call.out
        if self.fp8:
            q = q.clamp(-self._limit, self._limit).to(self.pool.kv_dtype)
            more = {"q_descale": self._one, "k_descale": layer.k_scale, "v_descale": layer.v_scale}
            out = call.out if call.out.dtype is torch.bfloat16 else None
        if self._last_pages:
            more["kv_last_page_lens"] = table.last_page_len
        flat = self.page == 1
        made = self._run(
            q=q if q.stride(2) == 1 else q.contiguous(), k=layer.k[:, 0] if flat else layer.k,
            v=layer.v[:, 0] if flat else layer.v, cu_seqlens_q=call.plan.query_offsets, kv_indptr=indptr,
            kv_page_indices=indices, max_seqlen_q=step.longest, max_seqlen_k=step.bound,
            softmax_scale=layer.scale, logits_soft_cap=layer.cap, causal=True, window_size=layer.sides,
            return_lse=call.lse is not None, out=out, **more,
        )  # fmt: skip
        _keep(call, layer, made)


class Gathered(Kernel):
    """`flash_attn_varlen_func` on keys gathered from the pool; on the arguments where nothing is cached."""

    strategies = (Strategy.PAGED, Strategy.RAGGED)

    def __init__(self, config: BackendConfig) -> None:
        """Raises `BackendBuildError` without it."""
        super().__init__(config)
        self._run = varlen_function(self.name)

    def run(self, call: AttentionCall, layer: Layer, step: Step) -> None:
        """Windows end at the last key: tables that begin late count the same."""
        plan, table = call.plan, call.table
        if table is None:
            assert call.k is not None
            assert call.v is not None
            k, v, offsets, longest = call.k, call.v, plan.query_offsets, step.longest
        else:
            assert table.host is not None
            offsets, indices = table.csr
            slots = indices[: int(table.host.indptr[-1])]
            k, v = layer.k[:, 0].index_select(0, slots), layer.v[:, 0].index_select(0, slots)
            longest = step.bound
        made = self._run(
            *(x if x.stride(2) == 1 else x.contiguous() for x in (call.q, k, v)),
            cu_seqlens_q=plan.query_offsets, cu_seqlens_k=offsets, max_seqlen_q=step.longest,
            max_seqlen_k=longest, softmax_scale=layer.scale, logits_soft_cap=layer.cap, causal=True,
            window_size=layer.sides, return_lse=call.lse is not None, out=call.out,
        )  # fmt: skip
        _keep(call, layer, made)


KERNELS: dict[str, type[Kernel]] = {
    "paged_attention_v1": PagedDecode,
    "pa_fwd_asm": PagedAsm,
    "unified_attention": Unified,
    "mha_batch_prefill": BatchPrefill,
    "flash_attn_varlen": Gathered,
}
"""By the first word of a capability row's method."""


def _table(call: AttentionCall) -> Table:
    assert call.table is not None
    return call.table


def _reach(table: Table, step: Step) -> int:
    """KV tokens of a request at most: a window's table is no wider than what its queries see."""
    return min(step.bound, table.blocks.shape[1] * table.form.kernel_page)


def _keep(call: AttentionCall, layer: Layer, made: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """What a CK call returned, in the call's tensors: `lse [Hq, T]` is the natural one already."""
    out, *rest = made if isinstance(made, tuple) else (made,)
    if out.data_ptr() == call.out.data_ptr():
        out = call.out
    layer.finish(out, call.out)
    if call.lse is not None:
        call.lse.copy_(rest[0].t())
