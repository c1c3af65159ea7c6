"""Stand-in for FlashInfer's decode wrapper of graphs (0.7.2.post1: `flashinfer/decode.py`)."""

from __future__ import annotations

import torch

from anyattn.testing.emulators.flashinfer_decode import BatchDecodeWithPagedKVCacheWrapper

__all__ = ["CUDAGraphBatchDecodeWithPagedKVCacheWrapper"]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The wrapper with buffers that a graph has seen."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
