"""Stand-in for FlashInfer's attention-sink wrapper (0.7.2.post1: `attention/_core.py`,
`jit/attention/variants.py`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from anyattn.testing.emulators.flashinfer_common import scalar
from anyattn.testing.emulators.flashinfer_kernel import (
    Planned,
    attend_requests,
    check_kernel,
    choose_backend,
)
from anyattn.testing.emulators.flashinfer_prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["BatchAttentionWithAttentionSinkWrapper"]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The variant with a sink in each row: `run(q, cache, sink, sm_scale)`. It has no cap and no mask."""

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        assert backend in ("fa2", "fa3", "auto")
        wanted = Planned(
            1, 1, head_dim_qk, head_dim_vo, q_data_type, kv_data_type, q_data_type, True, -1, 0.0, None, 0
        )
        if backend == "auto":
            backend = choose_backend(
                wanted, custom_mask_buf is not None, fp16_reduction=use_fp16_qk_reduction
            )
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip
        check_kernel(backend, wanted)
        self._sink_module = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left >= 0)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, args: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned, built = self._planned, self._sink_module
        assert planned is not None and built is not None  # noqa: PT018
        if not args or not torch.is_tensor(args[0]) or args[0].dtype != torch.float32:
            raise TypeError("Mismatched type on argument sink: expected a float32 Tensor")
        if len(args) > 1:
            scale = scalar("sm_scale", args[1])  # as given: k_scale has no part in it
        fa3 = self._backend == "fa3"
        keys, values = (self._table.keys(x, self._kv_layout, by_length=fa3) for x in (k, v))
        masks = self._masks(keys)
        if masks is not None:  # the variant has no mask of its own: CUSTOM means everything
            masks = [torch.ones_like(mask) for mask in masks]
        # fa3's window is compiled in; fa2's variant always looks at the planned one.
        window = planned.window_left if built[4] or not fa3 else -1
        result, natural = attend_requests(
            q, keys, values, self._spans, planned, scale, masks=masks, sinks=args[0], cap=0.0,
            window_left=window,
        )  # fmt: skip
        if built[:4] != (planned.q_dtype, planned.kv_dtype, planned.dim, planned.v_dim):
            return result * math.nan, natural * math.nan
        return result, natural
