"""Stand-in for FlashInfer's planned decode wrapper (0.7.2.post1: `flashinfer/decode.py`)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from anyattn.testing.emulators.flashinfer_common import (
    FP8,
    as_dtype,
    check_aligned,
    check_layout,
    check_like,
    chip,
    finish_lse,
    host_copy,
    kv_lengths,
    scalar,
    to_device,
    unpack_cache,
    use_workspace,
)
from anyattn.testing.emulators.flashinfer_kernel import (
    Planned,
    check_kernel,
    choose_backend,
    legacy_keywords,
    stamped,
)
from anyattn.testing.emulators.flashinfer_native import Schedule, decode_module
from anyattn.testing.emulators.flashinfer_tables import check_int32, fill_buffer
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["BatchDecodeWithPagedKVCacheWrapper"]

_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # DISPATCH_GQA_GROUP_SIZE in utils.cuh
_POSITIONAL = (
    "pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "o_data_type",
    "data_type", "sm_scale", "rope_scale", "rope_theta", "non_blocking", "block_tables", "seq_lens",
    "fixed_split_size", "disable_split_kv", "q_len_per_req",
)  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode of one or `q_len_per_req` tokens a request over pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        check_layout(kv_layout)
        if jit_args is not None or backend not in ("auto", "fa2", "fa3"):
            raise EmulationError("decode wrapper", asked=(backend, jit_args), allowed="auto, fa2, fa3")
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer
        self._kv_layout, self._use_cuda_graph = kv_layout, use_cuda_graph
        self._fixed_batch_size = 0
        if use_cuda_graph:
            if not all(torch.is_tensor(buffer) for buffer in self._buffers):
                raise ValueError("buffers of the tables should be torch.Tensors in cudagraph mode")
            indptr, _, last = self._buffers
            self._fixed_batch_size = len(last)
            if len(indptr) != len(last) + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._use_tensor_cores = use_tensor_cores
        self._backend = self._requested_backend = backend
        self._q_len_per_req: int | None = None
        self._planned: Planned | None = None
        self._plan_info: Schedule | None = None
        self._sizes: tuple[Any, ...] = ()
        self.device = float_workspace_buffer.device
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8))

    @property
    def _buffers(self) -> tuple[Any, Any, Any]:
        return self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf

    @property
    def use_tensor_cores(self) -> bool:
        """As constructed."""
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As constructed."""
        return self._use_cuda_graph

    @property
    def resolved_backend(self) -> str:
        """What `auto` became."""
        return "fa2" if self._backend == "auto" and not self._use_tensor_cores else self._backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Other scratch memory; the schedule of a plan stands in the integer one."""
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            if buffer.numel() and buffer.data_ptr() % 16:
                raise ValueError(f"{name}_workspace_buffer must be 16-byte aligned")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Plan one step over pages. Raises as the library, `EmulationError` for what isn't emulated."""
        if deprecated_positional_args:
            kwargs = legacy_keywords(_POSITIONAL, deprecated_positional_args, kwargs)
            warnings.warn("plan() with positional options is deprecated", DeprecationWarning, stacklevel=2)
        self._plan_impl(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs
        )

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
    ) -> None:
        if pos_encoding_mode != "NONE":
            raise EmulationError("pos_encoding_mode", asked=pos_encoding_mode, allowed="NONE")
        q_dtype = as_dtype(q_data_type or data_type or "float16")
        kv_dtype = as_dtype(kv_data_type or data_type or q_dtype)
        if window_right != 0:
            raise NotImplementedError("window_right != 0 only with backend='cute-dsl'")
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req must be >= 1, got {q_len_per_req}")
        if is_causal is not None and is_causal != (q_len_per_req > 1):
            raise NotImplementedError("an explicit is_causal override is not supported")
        if q_len_per_req > 1 and not self._use_tensor_cores:
            raise ValueError("q_len_per_req > 1 requires tensor-core decode")
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        self._check_graph(len(last_page_len), len(indices), q_len_per_req)
        host, host_last = host_copy("indptr", indptr), host_copy("last_page_len", last_page_len)
        lens = kv_lengths(host, host_last, page_size) if seq_lens is None else host_copy("seq_lens", seq_lens)
        if q_len_per_req > 1 and int(lens.min()) < q_len_per_req:
            raise ValueError(f"q_len_per_req={q_len_per_req} requires kv_len >= q_len_per_req")
        self._planned = Planned(
            num_qo_heads, num_kv_heads, head_dim, head_dim, q_dtype, kv_dtype,
            as_dtype(o_data_type or q_dtype), q_len_per_req > 1, window_left, logits_soft_cap or 0.0,
            sm_scale, 0,
        )  # fmt: skip
        self._check_kernel(self._planned, q_len_per_req)
        check_int32(indptr=indptr, indices=indices, last_page_len=last_page_len)
        self._set_table(indptr, indices, last_page_len)
        self._plan_natively(self._planned, host, lens, page_size, q_len_per_req)
        assert self._plan_info is not None
        self._sizes = self._plan_info.sizes
        use_workspace(self._float_workspace_buffer)
        self._q_len_per_req, self._page_size = q_len_per_req, page_size

    def _check_graph(self, batch: int, indices: int, q_len: int) -> None:
        if not self._use_cuda_graph:
            return
        if self._q_len_per_req not in (None, q_len):
            raise ValueError("q_len_per_req is part of the frozen cudagraph shape")
        if batch != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode: {batch}")
        if indices > len(self._paged_kv_indices_buf):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def _check_kernel(self, planned: Planned, q_len: int) -> None:
        if not self._use_tensor_cores:
            if planned.q_heads // planned.kv_heads not in _GROUPS:
                raise RuntimeError(f"Unsupported group_size: {planned.q_heads // planned.kv_heads}")
            check_kernel("fa2", planned)
            return
        if self._requested_backend == "auto" and chip() in (100, 103) and 2 <= q_len <= 4:
            raise EmulationError("auto may become cudnn here", asked=q_len, hint="name a backend")
        if self._backend == "auto":
            self._backend = choose_backend(planned, False) if planned.kv_dtype in FP8 else "fa2"
        if q_len > 1 and self._backend == "fa3":
            raise NotImplementedError("q_len_per_req > 1 is currently only supported on fa2")
        check_kernel(self._backend, planned)

    def _set_table(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        if self._use_cuda_graph:
            for index, source in enumerate((indptr, indices, last)):
                fill_buffer(self._buffers[index], source, head=index == 1)
            return
        self._paged_kv_indptr_buf = to_device(indptr, self.device)
        self._paged_kv_indices_buf = indices.to(self.device)
        self._paged_kv_last_page_len_buf = to_device(last, self.device)

    def _plan_natively(
        self, planned: Planned, indptr: torch.Tensor, lens: torch.Tensor, page_size: int, q_len: int
    ) -> None:
        spaces = (
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer
        )  # fmt: skip
        batch, dims = len(lens), (planned.dim, planned.v_dim)
        heads, graph = (planned.q_heads, planned.kv_heads, page_size), self._use_cuda_graph
        if not self._use_tensor_cores:
            self._cached_module = decode_module("cores", planned.q_dtype, planned.kv_dtype, *dims)
            dtypes = (torch.empty(0, dtype=d) for d in (planned.q_dtype, planned.kv_dtype))
            left, cap = planned.window_left, planned.cap
            self._plan_info = self._cached_module.plan(
                *spaces, indptr, batch, *heads, graph, left, cap, *dims, *dtypes
            )
            return
        self._cached_module = decode_module(self._backend, planned.q_dtype, planned.kv_dtype, *dims)
        queries = torch.arange(batch + 1, dtype=torch.int32) * q_len
        more = (-1, False, 0, q_len if q_len > 1 else 0) if self._backend == "fa2" else ()
        self._plan_info = self._cached_module.plan(
            *spaces, queries, indptr, lens.to(torch.int32), batch * q_len, batch, *heads, graph, *dims,
            q_len > 1, planned.window_left, *more,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Attend with the planned schedule: `out`, or `(out, lse)` with the LSE `[T, Hq]` in base 2."""
        planned, (k, v) = self._planned, unpack_cache(paged_kv_cache, self._kv_layout)
        schedule = self._plan_info
        assert planned is not None, "plan info is not initialized"
        assert schedule is not None
        if q.dtype != planned.q_dtype or k.dtype != planned.kv_dtype:
            raise ValueError(f"The dtype of q {q.dtype} or k {k.dtype} does not match plan()")
        batch = len(self._paged_kv_last_page_len_buf)
        q_len = q.shape[0] // batch if q_len_per_req is None else q_len_per_req
        if q.shape[0] != batch * q_len or q_len != self._q_len_per_req:
            raise ValueError(f"q implies q_len_per_req={q_len} but plan() used {self._q_len_per_req}")
        assert window_left is None or window_left == planned.window_left
        if k.stride() != v.stride():
            raise RuntimeError("K/V strides differ")
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_aligned(name, x)
        scale = scalar("sm_scale", q.shape[-1] ** -0.5 if planned.sm_scale is None else planned.sm_scale)
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else scalar("sm_scale", factor)
        if out is None:
            out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=planned.o_dtype)
        check_like(out, q.shape, planned.o_dtype, "out")
        # `sinks` is taken and dropped: fa2 and fa3 have no argument for it (vllm#52148).
        natural = self._launch(q, k, v, out, lse, scale)
        if not (schedule.sizes == self._sizes and stamped(self._int_workspace_buffer, schedule.serial)):
            out, natural = out.fill_(math.nan), natural * math.nan
        if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
            out *= v_scale
        return (out, finish_lse(natural, "log2", "NH", lse)) if return_lse else out

    def _launch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor | None, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """The compiled kernel, given what 0.7.2 gives it; the natural LSE."""
        natural: torch.Tensor
        planned, module, schedule = self._planned, self._cached_module, self._plan_info
        assert planned is not None
        assert schedule is not None
        front = (self._float_workspace_buffer, self._int_workspace_buffer, schedule, q, k, v)
        layout, left, pdl = int(self._kv_layout == "HND"), planned.window_left, True
        slopes = torch.empty(0)
        if not self._use_tensor_cores:
            natural = module.run(
                *front, *self._buffers, out, lse, layout, left, pdl, slopes, planned.cap, scale, 1.0, 1e4
            )
            return natural
        queries = torch.arange(schedule.rows + 1, dtype=torch.int32)
        after = (int(planned.causal), layout, left, pdl, None, None, slopes, None, None, None)
        natural = module.paged_run(
            *front, queries, *self._buffers, out, lse, *after, planned.cap, scale, *(None,) * 3, 1.0, 1e4, 0,
            self._float_workspace_buffer.numel(),
        )  # fmt: skip
        return natural

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """`run(..., return_lse=True)`."""
        return self.run(*args, return_lse=True, **kwargs)
