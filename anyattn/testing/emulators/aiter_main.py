"""What ROCm/aiter's main branch (v0.1.20) has in place of the PyPI build's signatures."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.testing.emulators.aiter_calls import batch_prefill, latent, unified, varlen
from anyattn.testing.emulators.aiter_kernels import chip, fp8_dtype, one_number, unshuffled
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["flash_attn_varlen_func", "mha_batch_prefill_func", "mla_decode_fwd", "unified_attention"]

Tensor = torch.Tensor


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    min_seqlen_q: Any = 0, dropout_p: Any = 0.0, softmax_scale: Any = None, logits_soft_cap: Any = 0.0,
    causal: Any = False, window_size: Any = (-1, -1, 0), bias: Any = None, alibi_slopes: Any = None,
    deterministic: Any = False, return_lse: Any = False, return_attn_probs: Any = False,
    how_v3_bf16_cvt: Any = 1, block_table: Any = None, out: Any = None, cu_seqlens_q_padded: Any = None,
    cu_seqlens_k_padded: Any = None, sink_ptr: Any = None,
) -> Any:  # fmt: skip
    """A window of three numbers, the last one of sink tokens; sinks as logits in `sink_ptr`."""
    if len(window_size) != 3:
        raise IndexError("tuple index out of range")
    if window_size[2] or bias is not None or alibi_slopes is not None or block_table is not None:
        raise EmulationError("sink tokens, biases and tables aren't emulated", asked=window_size)
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, logits_soft_cap,
        causal, window_size, return_lse, out, sink_ptr,
    )  # fmt: skip


def mha_batch_prefill_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, kv_indptr: Any, kv_page_indices: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: Any = 0.0, softmax_scale: Any = None, logits_soft_cap: Any = 0.0,
    causal: Any = False, window_size: Any = (-1, -1), alibi_slopes: Any = None, deterministic: Any = False,
    return_lse: Any = False, return_attn_probs: Any = False, out: Any = None, kv_last_page_lens: Any = None,
    block_table: Any = None, seqlen_k: Any = None, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, kv_block_descale: Any = None, sink_ptr: Any = None, sink_size: int = 0,
) -> Any:  # fmt: skip
    """Caches of single tokens, of pages or vectorised; fp8 needs all three descales and gives bf16."""
    if block_table is not None or kv_block_descale is not None or alibi_slopes is not None or sink_size:
        raise EmulationError("tables, page descales and ALiBi aren't emulated", asked="block_table")
    vector = 16 // k.element_size()
    if k.dim() == 5 and v.dim() == 5:
        if k.shape[-2] % vector:
            raise ValueError("Vectorized KV requires page size divisible by vector size")
        caches = unshuffled(k, v)
    elif k.dim() == v.dim() and k.dim() in (3, 4):
        caches = (k, v) if k.dim() == 4 else (k[:, None], v[:, None])
    else:
        raise ValueError("Batch prefill requires 5D vectorized, 4D linear, or 3D linear K/V tensors")
    if q.shape[-1] % vector:
        raise ValueError("Batch prefill requires head size divisible by vector size")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("Batch prefill requires K/V with contiguous last dimension")
    scales = (1.0, 1.0)
    if q.dtype == fp8_dtype():
        if None in (q_descale, k_descale, v_descale):
            raise RuntimeError("fp8 batch prefill needs q_descale, k_descale and v_descale")
        scales = one_number(q_descale) * one_number(k_descale), one_number(v_descale)
    if k.dtype != q.dtype:
        raise RuntimeError("query and key must have the same dtype")
    return batch_prefill(
        q, caches, cu_seqlens_q, kv_indptr, kv_page_indices, kv_last_page_lens, max_seqlen_q, max_seqlen_k,
        softmax_scale, logits_soft_cap, causal, window_size, return_lse, out, sink_ptr, scales,
    )  # fmt: skip


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: Any, seqused_k: Any, max_seqlen_k: Any,
    softmax_scale: Any, causal: Any, window_size: Any, block_table: Any, softcap: Any, q_descale: Any,
    k_descale: Any, v_descale: Any, q_scales: Any = None, alibi_slopes: Any = None, output_scale: Any = None,
    qq_bias: Any = None, sinks: Any = None, shuffled_kv_cache: bool = False, skip_reduce: bool = False,
) -> None:  # fmt: skip
    """`q_scales` stands before `alibi_slopes`: positional calls written for PyPI's shift."""
    if any(x is not None for x in (q_descale, q_scales, alibi_slopes, output_scale, qq_bias)):
        raise EmulationError("scales of Q, ALiBi and biases aren't emulated", asked="q_scales")
    if shuffled_kv_cache or skip_reduce:
        raise EmulationError("shuffled caches aren't emulated", asked="shuffled_kv_cache")
    unified(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, softmax_scale, causal, window_size, block_table,
        softcap, k_descale, v_descale, sinks,
    )  # fmt: skip


def mla_decode_fwd(
    q: Any, kv_buffer: Any, o: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_lens: Any,
    max_seqlen_q: Any, page_size: Any = 1, nhead_kv: Any = 1, sm_scale: Any = None, logit_cap: Any = 0.0,
    num_kv_splits: Any = None, num_kv_splits_indptr: Any = None, work_meta_data: Any = None,
    work_indptr: Any = None, work_info_set: Any = None, reduce_indptr: Any = None,
    reduce_final_map: Any = None, reduce_partial_map: Any = None, q_scale: Any = None, kv_scale: Any = None,
    intra_batch_mode: Any = False, return_logits: Any = False, return_lse: Any = False,
    g_kv_indptr: Any = None, cp_world_size: Any = 1, cp_rank: Any = 0, causal: Any = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`page_size` stands where PyPI's has the scale: a scale passed there is a page size of no kernel."""
    if page_size != 1 or nhead_kv != 1:
        raise RuntimeError(f"mla_decode_stage1_asm_fwd: no kernel for page_size {page_size}")
    if cp_world_size != 1 or not causal or return_lse:
        raise EmulationError("context parallelism and LSE aren't emulated", asked=cp_world_size)
    heads = (8, 16, 32, 64, 128) if chip() == "gfx950" else (8, 16, 64, 128)
    return latent(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, max_seqlen_q, sm_scale, logit_cap, work_meta_data,
        q_scale, kv_scale, heads,
    )  # fmt: skip
