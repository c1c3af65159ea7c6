"""Stand-in for FlashInfer's ragged prefill, K and V as tensors (0.7.2.post1: `flashinfer/prefill.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import (
    FP8,
    as_dtype,
    check_aligned,
    check_layout,
    check_like,
    chip,
    finish_lse,
    host_copy,
    put,
    scalar,
    to_device,
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
from anyattn.testing.emulators.flashinfer_tables import check_int32, fill_buffer
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["BatchPrefillWithRaggedKVCacheWrapper"]


class BatchPrefillWithRaggedKVCacheWrapper:
    """Queries and keys of several requests, one after another."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
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
                "ragged wrapper", asked=backend, allowed="auto, fa2 or fa3, without jit_args"
            )
        self._kv_layout, self._use_cuda_graph = kv_layout, use_cuda_graph
        self._requested_backend = self._backend = backend
        if use_cuda_graph:
            if qo_indptr_buf is None or kv_indptr_buf is None:
                raise ValueError("qo_indptr_buf and kv_indptr_buf should be torch.Tensors in cuda graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(kv_indptr_buf) != len(qo_indptr_buf):
                raise ValueError("The length of kv_indptr_buf should be the same as qo_indptr_buf")
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._custom_mask_buf, self._mask_indptr_buf = custom_mask_buf, mask_indptr_buf
        self._max_total_num_rows: int | None = None
        self._planned: Planned | None = None
        self.device = float_workspace_buffer.device
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As constructed."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Other scratch memory; the schedule of a plan stands in the integer one."""
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Plan one step. Raises what the library raises, `EmulationError` for what isn't emulated."""
        if pos_encoding_mode != "NONE" or prefix_len_ptr is not None:
            raise EmulationError("position encodings and items", asked=pos_encoding_mode, allowed="NONE")
        q_dtype = as_dtype(q_data_type)
        self._planned = Planned(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, q_dtype,
            as_dtype(kv_data_type or q_dtype), as_dtype(o_data_type or q_dtype), causal, window_left,
            logits_soft_cap or 0.0, sm_scale, 0,
        )  # fmt: skip
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        mask: tuple[torch.Tensor, torch.Tensor] | None = None
        if custom_mask is not None or packed_custom_mask is not None:
            cells = torch.zeros_like(qo_indptr)
            cells[1:] = torch.cumsum((qo_indptr[1:] - qo_indptr[:-1]) * (kv_indptr[1:] - kv_indptr[:-1]), 0)
            if packed_custom_mask is not None:
                mask = (packed_custom_mask, cells)
            else:
                assert custom_mask is not None
                mask = pack_mask(custom_mask.contiguous().view(-1), cells)
        host_q, host = host_copy("qo_indptr", qo_indptr), host_copy("kv_indptr", kv_indptr)
        self._qo_indptr_last = int(host_q[-1])
        check_int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        self._stage(qo_indptr, kv_indptr, mask)
        if self._requested_backend == "auto":
            if chip() in (100, 103):
                raise EmulationError("auto may become cudnn or cutlass here", asked="auto", hint="name one")
            masked = self._custom_mask_buf is not None
            self._backend = choose_backend(self._planned, masked, fp16_reduction=use_fp16_qk_reduction)
        check_kernel(self._backend, self._planned)
        self._spans, self._kv_spans = softmax.offsets(host_q), softmax.offsets(host)
        self._planned.serial = stamp(self._int_workspace_buffer)
        use_workspace(self._float_workspace_buffer)

    begin_forward = plan

    def _stage(
        self, qo: torch.Tensor, kv: torch.Tensor, mask: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        """Tables and mask. Without a graph a mask of an earlier plan stays where none is given."""
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._kv_indptr_buf = (to_device(x, self.device) for x in (qo, kv))
            if mask is not None:
                self._custom_mask_buf, self._mask_indptr_buf = mask
            return
        rows = self._qo_indptr_last
        self._max_total_num_rows = self._max_total_num_rows or rows
        if rows > self._max_total_num_rows:
            raise ValueError(f"The total number of rows in qo_indptr {rows} in cuda graph mode cannot grow")
        if len(qo) - 1 != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode: {len(qo) - 1}")
        assert self._qo_indptr_buf is not None
        assert self._kv_indptr_buf is not None
        fill_buffer(self._qo_indptr_buf, qo)
        fill_buffer(self._kv_indptr_buf, kv)
        if mask is not None:
            if self._custom_mask_buf is None or self._mask_indptr_buf is None:
                raise ValueError("custom_mask_buf and mask_indptr_buf must be initialized in cuda graph mode")
            fill_buffer(self._custom_mask_buf, mask[0], head=True)
            fill_buffer(self._mask_indptr_buf, mask[1])

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Attend with the planned schedule: `out`, or `(out, lse)` in the base and axis order asked for."""
        planned = self._planned
        assert planned is not None, "plan info is not initialized"
        if q.dtype != planned.q_dtype or k.dtype != planned.kv_dtype:
            raise ValueError(f"The dtype of q {q.dtype} or k {k.dtype} does not match plan()")
        if q.shape[0] != self._qo_indptr_last:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1]")
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_aligned(name, x)
        # K and V scales count for fp8 keys under 16-bit queries only; elsewhere they are dropped.
        scaled = k.dtype in FP8 and q.dtype not in FP8
        scale = q.shape[-1] ** -0.5 if planned.sm_scale is None else scalar("sm_scale", planned.sm_scale)
        if scaled and k_scale is not None:
            scale *= scalar("sm_scale", k_scale)
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        keys, values = ([x[a:b] for a, b in self._kv_spans] for x in (k, v))
        for (start, stop), rows in zip(self._kv_spans, keys, strict=True):
            softmax.check(rows.shape[0] == stop - start, f"illegal memory access: k ends before {stop}")
        result, natural = attend_requests(
            q, keys, values, self._spans, planned, scale, masks=self._masks(keys)
        )
        if not (self._as_planned() and stamped(self._int_workspace_buffer, planned.serial)):
            result, natural = result * math.nan, natural * math.nan
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=planned.o_dtype) if out is None else out
        check_like(out, (*q.shape[:-1], v.shape[-1]), planned.o_dtype, "out")
        use_workspace(self._float_workspace_buffer)
        put(out, result, strided=self._backend == "fa3")
        if scaled and v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
            out *= v_scale
        return (out, finish_lse(natural, lse_base, lse_layout, lse)) if return_lse else out

    def _as_planned(self) -> bool:
        """The kernels read the offsets that the schedule was made for."""
        assert self._qo_indptr_buf is not None
        assert self._kv_indptr_buf is not None
        rows = softmax.offsets(self._qo_indptr_buf) == self._spans
        return rows and softmax.offsets(self._kv_indptr_buf) == self._kv_spans

    def _masks(self, keys: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if self._custom_mask_buf is None:
            return None
        if self._backend == "fa3":
            raise RuntimeError("BatchPrefillWithRaggedKVCache failed with error operation not supported")
        assert self._mask_indptr_buf is not None
        starts = self._mask_indptr_buf.tolist()
        return [
            mask_bits(self._custom_mask_buf, starts[i], stop - start, keys[i].shape[0])
            for i, (start, stop) in enumerate(self._spans)
        ]

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """`run(..., return_lse=True)`."""
        return self.run(*args, return_lse=True, **kwargs)
