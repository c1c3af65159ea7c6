"""Stand-in for AMD's AITER, `aiter`: amd-aiter 0.1.7.post2.dev18, or ROCm/aiter v0.1.20 where the emulated
host says so (`rocm:gfx942+amd-aiter==0.1.20`). Signatures differ between the two; see `aiter_main`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators import aiter_main
from anyattn.testing.emulators.aiter_calls import (
    HALVES,
    batch_prefill,
    latent,
    mla_prefill_fwd,
    unified,
    varlen,
)
from anyattn.testing.emulators.aiter_kernels import chip, fp8_dtype, one_number, paged_rows, unshuffled
from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.softmax import check, offsets

__all__ = ["modules"]

Tensor = torch.Tensor


def _is_main() -> bool:
    version = (current_host() or "").partition("amd-aiter==")[2].split("+")[0].split("-")[0]
    return tuple(int(n) for n in version.split(".")[:3] if n.isdigit()) >= (0, 1, 20) if version else False


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules of the generation that the emulated host has."""
    main = _is_main()
    triton = "aiter.ops.triton.attention.unified_attention" if main else "aiter.ops.triton.unified_attention"
    own: dict[str, Callable[..., Any]] = {
        "paged_attention_v1": paged_attention_v1,
        "paged_attention_ragged": paged_attention_ragged,
        "pa_fwd_asm": pa_fwd_asm,
        "flash_attn_varlen_func": aiter_main.flash_attn_varlen_func if main else flash_attn_varlen_func,
        "mha_batch_prefill_func": aiter_main.mha_batch_prefill_func if main else mha_batch_prefill_func,
    }
    unified = aiter_main.unified_attention if main else unified_attention
    decode = aiter_main.mla_decode_fwd if main else mla_decode_fwd
    dtypes = {"fp8": fp8_dtype(), "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return module_tree(
        {
            "aiter": dict(own),
            "aiter.ops.attention": {n: own[n] for n in list(own)[:3]},
            "aiter.ops.mha": {n: own[n] for n in list(own)[3:]},
            triton: {"unified_attention": unified},
            "aiter.mla": {"mla_decode_fwd": decode, "mla_prefill_fwd": mla_prefill_fwd},
            "aiter.dtypes": dtypes,
        }
    )


# --- decode ------------------------------------------------------------------------------------------------


def _through_pointers(query: Tensor, out: Tensor, found: Tensor) -> Tensor:
    """Kernels are given the stride of query tokens alone (csrc/cpp_itfs/pa/pa_kernels.cuh): heads with gaps
    are misread, and outputs are written as if they had none.
    """
    dense = query.stride(1) == query.shape[2] and query.stride(2) == 1 and out.is_contiguous()
    return out.copy_(found) if dense else out.fill_(math.nan)


def _check_cache(query: Tensor, cache: Tensor, kv_cache_dtype: str) -> None:
    if query.dtype not in HALVES:
        raise ValueError(f"Unsupported data type: {query.dtype}")
    if kv_cache_dtype == "auto":
        check(cache.dtype == query.dtype, "kv_cache_dtype 'auto' reads the cache as the query's dtype")
    elif kv_cache_dtype in ("fp8", "fp8_e4m3"):
        check(cache.dtype in (fp8_dtype(), torch.uint8), f"an fp8 cache of {chip()} is {fp8_dtype()}")
    else:
        raise ValueError(f"Unsupported kv_cache_dtype: {kv_cache_dtype}")


def _as_fp8(cache: Tensor) -> Tensor:
    return cache.view(fp8_dtype()) if cache.dtype == torch.uint8 else cache


def paged_attention_v1(
    out: Tensor, workspace_buffer: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    scale: float, block_tables: Tensor, cu_query_lens: Tensor | None, context_lens: Tensor,
    max_context_len: int, alibi_slopes: Tensor | None, kv_cache_dtype: str, kv_cache_layout: str,
    logits_soft_cap: float, k_scale: Tensor, v_scale: Tensor, fp8_out_scale: Tensor | None = None,
    partition_size: int = 256, mtp: int = 1, sliding_window: int = 0,
) -> Tensor:  # fmt: skip
    """Writes `out [B, Hq, D]`. `sliding_window` counts keys seen, the own one included; 0 is none.

    Raises:
        ValueError: dtypes, a table or a workspace that don't do. RuntimeError: garbage on a device.
        EmulationError: drafts, ALiBi and fp8 outputs.
    """
    if mtp != 1 or cu_query_lens is not None or alibi_slopes is not None or fp8_out_scale is not None:
        raise EmulationError("drafts, ALiBi and fp8 outputs aren't emulated", asked=mtp, allowed="mtp=1")
    _check_cache(query, key_cache, kv_cache_dtype)
    caches = (_as_fp8(key_cache), _as_fp8(value_cache))
    if kv_cache_layout == "HND":
        caches = caches[0].transpose(1, 2), caches[1].transpose(1, 2)
    page, parts = caches[0].shape[1], math.ceil(max_context_len / partition_size)
    if block_tables.shape[1] < math.ceil(max_context_len / page):
        raise ValueError(f"paged_attention_v1: block_tables of width {block_tables.shape[1]} are too narrow")
    if context_lens.shape[0] != block_tables.shape[0]:
        raise ValueError("paged_attention_v1: context_lens and block_tables disagree")
    rows = block_tables.shape[0] * query.shape[1] * parts
    needed = rows * query.shape[2] * query.element_size() + 2 * rows * 4
    if workspace_buffer.numel() * workspace_buffer.element_size() < needed:
        raise ValueError(f"paged_attention_v1: workspace_buffer is too small, {needed} bytes are needed")
    for name, x in (("block_tables", block_tables), ("context_lens", context_lens)):
        check(x.dtype == torch.int32, f"{name} are read as int32, whatever they are")
    found = paged_rows(
        query,
        caches,
        block_tables,
        context_lens,
        scale=scale,
        window=sliding_window,
        cap=max(logits_soft_cap, 0.0),
        scales=(one_number(k_scale), one_number(v_scale)),
        bound=max_context_len,
    )
    return _through_pointers(query, out, found)


def paged_attention_ragged(
    out: Tensor, workspace_buffer: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor,
    scale: float, kv_indptr: Tensor, kv_page_indices: Tensor, kv_last_page_lens: Tensor, block_size: int,
    max_num_partitions: int, alibi_slopes: Tensor | None, kv_cache_dtype: str, kv_cache_layout: str,
    logits_soft_cap: float, k_scale: Tensor, v_scale: Tensor, fp8_out_scale: Tensor | None = None,
    partition_size: int = 256, mtp: int = 1,
) -> Tensor:  # fmt: skip
    """Writes `out [B, Hq, D]`; pages as CSR, no window argument at all."""
    if mtp != 1 or alibi_slopes is not None or fp8_out_scale is not None:
        raise EmulationError("drafts, ALiBi and fp8 outputs aren't emulated", asked=mtp, allowed="mtp=1")
    _check_cache(query, key_cache, kv_cache_dtype)
    caches = (_as_fp8(key_cache), _as_fp8(value_cache))
    if kv_cache_layout == "HND":
        caches = caches[0].transpose(1, 2), caches[1].transpose(1, 2)
    check(caches[0].shape[1] == block_size, "block_size isn't the cache's")
    spans = offsets(kv_indptr)
    width = max([stop - start for start, stop in spans], default=1)
    table = torch.zeros(len(spans), max(width, 1), dtype=torch.int32)
    lengths = torch.zeros(len(spans), dtype=torch.int32)
    for index, (start, stop) in enumerate(spans):
        table[index, : stop - start] = kv_page_indices[start:stop].cpu()
        lengths[index] = (
            (stop - start - 1) * block_size + int(kv_last_page_lens[index]) if stop > start else 0
        )
    return out.copy_(
        paged_rows(
            query,
            caches,
            table,
            lengths,
            scale=scale,
            window=0,
            cap=max(logits_soft_cap, 0.0),
            scales=(one_number(k_scale), one_number(v_scale)),
            bound=max_num_partitions * partition_size,
        )
    )


def pa_fwd_asm(
    Q: Tensor, K: Tensor, V: Tensor, block_tables: Tensor, context_lens: Tensor, block_tables_stride0: int,
    max_qlen: int = 1, K_QScale: Tensor | None = None, V_QScale: Tensor | None = None,
    out_: Tensor | None = None, qo_indptr: Tensor | None = None, high_precision: int | None = 1,
    kernelName: str | None = None,
) -> Tensor:  # fmt: skip
    """Vectorised caches, D = 128, pages of 16, scale 1/sqrt(128) built in."""
    if max_qlen != 1 or qo_indptr is not None or K_QScale is not None or V_QScale is not None:
        raise EmulationError(
            "drafts and quantised caches aren't emulated", asked=max_qlen, allowed="one query"
        )
    check(Q.dtype in HALVES, f"unsupport Q dtype:{Q.dtype}")
    check(K.dtype == Q.dtype, f"unsupport K dtype:{K.dtype}")
    check(Q.shape[2] == 128, "only support head_size == 128 for now")
    caches = unshuffled(K, V)
    check(caches[0].shape[1] == 16, "not supported this kernel now! ")
    check(block_tables_stride0 == block_tables.stride(0), "illegal memory access: the table's stride")
    found = paged_rows(
        Q, caches, block_tables, context_lens, scale=128**-0.5, window=0, cap=0.0, scales=(1.0, 1.0),
        bound=block_tables.shape[1] * 16,
    )  # fmt: skip
    return _through_pointers(Q, torch.empty_like(Q) if out_ is None else out_, found)


# --- prefill -----------------------------------------------------------------------------------------------


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any,
    min_seqlen_q: Any = 0, dropout_p: Any = 0.0, softmax_scale: Any = None, logits_soft_cap: Any = 0.0,
    causal: Any = False, window_size: Any = (-1, -1), bias: Any = None, alibi_slopes: Any = None,
    deterministic: Any = False, return_lse: Any = False, return_attn_probs: Any = False,
    how_v3_bf16_cvt: Any = 1, block_table: Any = None, out: Any = None, cu_seqlens_q_padded: Any = None,
    cu_seqlens_k_padded: Any = None,
) -> Any:  # fmt: skip
    """PyPI's: out `[T, Hq, Dv]`, with `return_lse` also the natural-log LSE `[Hq, T]`."""
    for name, value in (("bias", bias), ("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if value is not None:
            raise EmulationError(f"{name} isn't emulated", asked=name, allowed="None")
    return varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, logits_soft_cap,
        causal, window_size, return_lse, out, None,
    )  # fmt: skip


def mha_batch_prefill_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, kv_indptr: Any, kv_page_indices: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: Any = 0.0, softmax_scale: Any = None, logits_soft_cap: Any = 0.0,
    causal: Any = False, window_size: Any = (-1, -1), alibi_slopes: Any = None, deterministic: Any = False,
    return_lse: Any = False, return_attn_probs: Any = False, out: Any = None,
) -> Any:  # fmt: skip
    """PyPI's: token indices over caches `[S, Hkv, D]`; 128 entries behind the last index are read."""
    if alibi_slopes is not None:
        raise EmulationError("alibi_slopes isn't emulated", asked="alibi_slopes", allowed="None")
    check(k.dim() == 3, "the PyPI build reads caches of single tokens, [S, Hkv, D]")
    pages = k[:, None], v[:, None]
    return batch_prefill(
        q, pages, cu_seqlens_q, kv_indptr, kv_page_indices, None, max_seqlen_q, max_seqlen_k, softmax_scale,
        logits_soft_cap, causal, window_size, return_lse, out, None, (1.0, 1.0),
    )  # fmt: skip


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: Any, seqused_k: Any, max_seqlen_k: Any,
    softmax_scale: Any, causal: Any, window_size: Any, block_table: Any, softcap: Any, q_descale: Any,
    k_descale: Any, v_descale: Any, alibi_slopes: Any = None, output_scale: Any = None, qq_bias: Any = None,
    sinks: Any = None,
) -> None:  # fmt: skip
    """PyPI's Triton kernel: writes `out`, returns nothing."""
    assert q_descale is None, "Q scales not supported"
    if alibi_slopes is not None or output_scale is not None or qq_bias is not None:
        raise EmulationError("ALiBi, biases and output scales aren't emulated", allowed="None")
    unified(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, softmax_scale, causal, window_size, block_table,
        softcap, k_descale, v_descale, sinks,
    )  # fmt: skip


# --- MLA ---------------------------------------------------------------------------------------------------


def mla_decode_fwd(
    q: Any, kv_buffer: Any, o: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_lens: Any,
    max_seqlen_q: Any, sm_scale: Any = None, logit_cap: Any = 0.0, num_kv_splits: Any = None,
    num_kv_splits_indptr: Any = None, work_meta_data: Any = None, work_indptr: Any = None,
    work_info_set: Any = None, reduce_indptr: Any = None, reduce_final_map: Any = None,
    reduce_partial_map: Any = None, q_scale: Any = None, kv_scale: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyPI's: writes `o [T, H, 512]`; what it returns is its scratch."""
    return latent(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, max_seqlen_q, sm_scale, logit_cap, work_meta_data,
        q_scale, kv_scale, (16, 128),
    )  # fmt: skip
