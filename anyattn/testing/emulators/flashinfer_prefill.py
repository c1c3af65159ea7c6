"""Stand-in for FlashInfer's paged prefill (0.7.2.post1: `flashinfer/prefill.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import (
    as_dtype,
    check_aligned,
    check_layout,
    check_like,
    finish_lse,
    host_copy,
    kv_lengths,
    put,
    scalar,
    to_device,
    unpack_cache,
    use_workspace,
)
from anyattn.testing.emulators.flashinfer_kernel import (
    Planned,
    attend_requests,
    check_kernel,
    choose_backend,
    mask_bits,
    pack_mask,
    stamp,
    stamped,
)
from anyattn.testing.emulators.flashinfer_tables import PageTable, check_int32, fill_buffer
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["BatchPrefillWithPagedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper:
    """Queries of several requests over pages: bottom-right causal, masked or open."""

    _sink_module: tuple[torch.dtype, torch.dtype, int, int, bool] | None = None

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        check_layout(kv_layout)
        if jit_args is not None or variant_owns_mask or backend not in ("auto", "fa2", "fa3"):
            raise EmulationError(
                "prefill wrapper", asked=backend, allowed="auto, fa2 or fa3, without jit_args"
            )
        self._kv_layout, self._use_cuda_graph, self._backend = kv_layout, use_cuda_graph, backend
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        if use_cuda_graph:
            qo, indptr, _, last = (self._buffer(i) for i in range(4))
            self._fixed_batch_size = len(qo) - 1
            if len(indptr) != len(qo) or len(last) != len(qo) - 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
        self._max_total_num_rows: int | None = None
        self._planned: Planned | None = None
        self.device = float_workspace_buffer.device
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8))

    def _buffer(self, index: int) -> torch.Tensor:
        buffer = self._buffers[index]
        if not torch.is_tensor(buffer):
            raise ValueError("buffers of the tables should be torch.Tensors in CUDA graph mode")
        return buffer

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As constructed."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Other scratch memory; the schedule of a plan stands in the integer one."""
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            if buffer.numel() and buffer.data_ptr() % 16:
                raise ValueError(f"{name}_workspace_buffer must be 16-byte aligned")
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plan one step over pages. Raises as the library, `EmulationError` for what isn't emulated."""
        if pos_encoding_mode != "NONE" or prefix_len_ptr is not None:
            raise EmulationError("position encodings and items", asked=pos_encoding_mode, allowed="NONE")
        q_dtype = as_dtype(q_data_type)
        self._planned = Planned(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, q_dtype,
            as_dtype(kv_data_type or q_dtype), as_dtype(o_data_type or q_dtype), causal, window_left,
            logits_soft_cap or 0.0, sm_scale, 0,
        )  # fmt: skip
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            cells = _page_mask_indptr(qo_indptr, paged_kv_indptr, paged_kv_last_page_len, page_size)
            mask = (packed_custom_mask, cells)
            if packed_custom_mask is None:
                assert custom_mask is not None
                mask = pack_mask(custom_mask.contiguous().view(-1), cells)
        host_q, host = host_copy("qo_indptr", qo_indptr), host_copy("paged_kv_indptr", paged_kv_indptr)
        last = host_copy("paged_kv_last_page_len", paged_kv_last_page_len)
        lens = kv_lengths(host, last, page_size) if seq_lens is None else host_copy("seq_lens", seq_lens)
        self._qo_indptr_last = int(host_q[-1])
        self._check_graph(len(host_q) - 1, len(paged_kv_indices))
        sources = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._set_tables(sources, (host[1:] - host[:-1]).tolist(), lens.tolist())
        self._set_mask(mask)
        if self._sink_module is None and self._backend == "auto":  # decided once, for all later plans
            masked = self._custom_mask_buf is not None
            self._backend = choose_backend(self._planned, masked, fp16_reduction=use_fp16_qk_reduction)
        check_kernel(self._backend, self._planned)
        self._spans = softmax.offsets(host_q)
        self._planned.serial = stamp(self._int_workspace_buffer)
        use_workspace(self._float_workspace_buffer)

    begin_forward = plan

    def _check_graph(self, batch: int, indices: int) -> None:
        if not self._use_cuda_graph:
            return
        rows = self._qo_indptr_last
        self._max_total_num_rows = self._max_total_num_rows or rows
        if rows > self._max_total_num_rows:
            raise ValueError(f"The total number of rows in qo_indptr {rows} in cuda graph mode cannot grow")
        if batch != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cuda graph mode: {batch}")
        if indices > len(self._buffer(2)):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")

    def _set_tables(self, sources: tuple[torch.Tensor, ...], pages: list[int], lens: list[int]) -> None:
        qo, indptr, indices, last = sources
        check_int32(qo_indptr=qo, paged_kv_indptr=indptr, paged_kv_indices=indices, last_page_len=last)
        if self._use_cuda_graph:
            for index, source in enumerate(sources):
                fill_buffer(self._buffer(index), source, head=index == 2)
            self._qo_indptr_buf = self._buffer(0)
            self._table = PageTable(self._buffer(1), self._buffer(2), self._buffer(3), pages, lens)
            return
        self._qo_indptr_buf, *ends = (to_device(x, self.device) for x in (qo, indptr, last))
        self._table = PageTable(ends[0], indices.to(self.device), ends[1], pages, lens)

    def _set_mask(self, mask: tuple[torch.Tensor | None, torch.Tensor] | None) -> None:
        """Under a graph the mask's buffers stay, and with them the custom mode of every later run."""
        if not self._use_cuda_graph:
            self._custom_mask_buf, self._mask_indptr_buf = mask if mask is not None else (None, None)
            return
        if mask is None or mask[0] is None:
            return
        if self._custom_mask_buf is None or self._mask_indptr_buf is None:
            raise ValueError("custom_mask_buf and mask_indptr_buf must be initialized in cuda graph mode")
        fill_buffer(self._custom_mask_buf, mask[0], head=True)
        fill_buffer(self._mask_indptr_buf, mask[1])

    def _masks(self, keys: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if self._custom_mask_buf is None:
            return None
        assert self._mask_indptr_buf is not None
        starts = self._mask_indptr_buf.tolist()
        return [
            mask_bits(self._custom_mask_buf, starts[i], stop - start, keys[i].shape[0])
            for i, (start, stop) in enumerate(self._spans)
        ]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attend with the planned schedule: `out`, or `(out, lse)` in the base and axis order asked for."""
        planned, (k, v) = self._planned, unpack_cache(paged_kv_cache, self._kv_layout)
        assert planned is not None, "plan info is not initialized"
        if q.dtype != planned.q_dtype or k.dtype != planned.kv_dtype:
            raise ValueError(f"The dtype of q {q.dtype} or k {k.dtype} does not match plan()")
        if q.shape[0] != self._qo_indptr_last:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1]")
        assert window_left is None or window_left == planned.window_left
        if self._backend == "fa3" and k.stride() != v.stride():
            raise RuntimeError("K/V strides differ")
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_aligned(name, x)
        scale: Any = q.shape[-1] ** -0.5 if planned.sm_scale is None else planned.sm_scale
        for factor in (q_scale, k_scale):
            scale = scale if factor is None else scale * factor
        result, natural = self._attend(q, k, v, scalar("sm_scale", scale), args)
        as_planned = softmax.offsets(self._qo_indptr_buf) == self._spans
        if not (as_planned and stamped(self._int_workspace_buffer, planned.serial)):
            result, natural = result * math.nan, natural * math.nan
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=planned.o_dtype) if out is None else out
        check_like(out, (*q.shape[:-1], v.shape[-1]), planned.o_dtype, "out")
        use_workspace(self._float_workspace_buffer)
        put(out, result, strided=self._backend == "fa3")
        if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
            out *= v_scale
        return (out, finish_lse(natural, lse_base, lse_layout, lse)) if return_lse else out

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, args: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sinks=` of `run` never gets here: fa2 and fa3 have no argument for it (vllm#52148)."""
        assert self._planned is not None
        by_length = self._backend == "fa3"
        keys = self._table.keys(k, self._kv_layout, by_length=by_length)
        values = self._table.keys(v, self._kv_layout, by_length=by_length)
        masks = self._masks(keys)
        if masks is not None and by_length:
            raise RuntimeError("BatchPrefillWithPagedKVCache failed with error operation not supported")
        return attend_requests(q, keys, values, self._spans, self._planned, scale, masks=masks)

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """`run(..., return_lse=True)`."""
        return self.run(*args, return_lse=True, **kwargs)


def _page_mask_indptr(
    qo: torch.Tensor, indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Cells before each request. A request without pages counts `last_page_len - page_size` keys."""
    if len(qo) != len(indptr):
        raise ValueError("The length of qo_indptr and paged_kv_indptr should be the same.")
    keys = (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len
    found = torch.zeros_like(qo)
    found[1:] = torch.cumsum((qo[1:] - qo[:-1]) * keys, 0)
    return found
