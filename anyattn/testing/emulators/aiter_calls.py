"""Calls of AITER that both generations of its API share, behind signatures that differ."""

from __future__ import annotations

import math
from typing import Any

import torch

from anyattn.testing.emulators.aiter_kernels import Ragged, fp8_dtype, latent_rows, one_number, ragged_rows
from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import check, gather, offsets

__all__ = ["HALVES", "batch_prefill", "latent", "unified", "varlen"]

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
_SLACK = 128  # entries that batch prefill reads behind the last index


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scale: float | None, cap: float, causal: bool, window: tuple[int, ...], lse: bool, out: Tensor | None,
    sinks: Tensor | None,
) -> Any:  # fmt: skip
    """Ragged keys."""
    check(q.dtype in HALVES, "mha only supports fp16 and bf16")
    check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check(x.dtype == torch.int32, f"{name} must have dtype int32")
    left, right = (-1 if w >= max_k else int(w) for w in window[:2])
    keys = [(k[start:stop], v[start:stop]) for start, stop in offsets(cu_k)]
    how = Ragged(
        scale=q.shape[-1] ** -0.5 if scale is None else scale, cap=cap, causal=causal, window=(left, right),
        max_q=int(max_q), sinks=sinks,
    )  # fmt: skip
    rows, sums = ragged_rows(q, cu_q, keys, how)
    return _finished(q, rows, sums, lse, out)


def _finished(q: Tensor, rows: Tensor, sums: Tensor, lse: bool, out: Tensor | None) -> Any:
    """As both generations return: out alone, or a tuple with the LSE by heads."""
    done = rows.to(q.dtype) if q.dtype in HALVES else rows.to(torch.bfloat16)
    result = done if out is None else out.copy_(done)
    return (result, sums.T.to(torch.float32).contiguous()) if lse else result


def batch_prefill(
    q: Tensor, caches: tuple[Tensor, Tensor], cu_q: Tensor, indptr: Tensor, indices: Tensor,
    last_page_lens: Tensor | None, max_q: int, max_k: int, scale: float | None, cap: float, causal: bool,
    window: tuple[int, int], lse: bool, out: Tensor | None, sinks: Tensor | None,
    scales: tuple[float, float],
) -> Any:  # fmt: skip
    """Pages `[N, P, Hkv, D]` as CSR."""
    for name, x in (("cu_seqlens_q", cu_q), ("kv_indptr", indptr), ("kv_page_indices", indices)):
        check(x.dtype == torch.int32, f"{name} must have dtype int32")
    check(
        indices.shape[0] >= int(indptr[-1]) + _SLACK, "illegal memory access: indices are read past the last"
    )
    page, keys = caches[0].shape[1], []
    for index, (start, stop) in enumerate(offsets(indptr)):
        tail = page if last_page_lens is None else int(last_page_lens[index])
        length = (stop - start - 1) * page + tail if stop > start else 0
        row = indices[start:stop]
        keys.append((gather(caches[0], row, length), gather(caches[1], row, length)))
    left, right = (-1 if w >= max_k else int(w) for w in window[:2])
    how = Ragged(
        scale=q.shape[-1] ** -0.5 if scale is None else scale, cap=cap, causal=causal, window=(left, right),
        max_q=int(max_q), sinks=sinks, scales=scales,
    )  # fmt: skip
    rows, sums = ragged_rows(q, cu_q, keys, how)
    return _finished(q, rows, sums, lse, out)


def unified(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_q: Tensor, max_q: int, lengths: Tensor, scale: float,
    causal: bool, window: tuple[int, int], table: Tensor, cap: float, k_scale: Any, v_scale: Any,
    sinks: Tensor | None,
) -> None:  # fmt: skip
    """Causal only, only the left bound of a window counts, heads in `[N, P, Hkv, D]`."""
    assert causal, "Only causal attention is supported"
    assert sinks is None or sinks.shape[0] == q.shape[1], "Sinks must be num_query_heads size"
    keys = [
        (gather(k, row, int(n)), gather(v, row, int(n)))
        for row, n in zip(table, lengths.tolist(), strict=True)
    ]
    how = Ragged(
        scale=scale, cap=cap, causal=True, window=(int(window[0]), 0), max_q=int(max_q), sinks=sinks,
        scales=(one_number(k_scale), one_number(v_scale)),
    )  # fmt: skip
    out.copy_(ragged_rows(q, cu_q, keys, how)[0])


def latent(
    q: Tensor, buffer: Tensor, o: Tensor, cu_q: Tensor, indptr: Tensor, indices: Tensor, max_q: int,
    scale: float | None, cap: float, work: Tensor | None, q_scale: Any, kv_scale: Any,
    heads: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Without the persistent kernels. Token indices: a page of 1."""
    assert cap <= 0, f"logit_cap={cap} is not support yet"
    if work is not None:
        raise EmulationError("persistent kernels aren't emulated", asked="work_meta_data", allowed="None")
    check(buffer.dim() == 4, "kv_buffer must have 4 dimensions")
    check(buffer.shape[2] == 1, "only support num_kv_heads==1 for now")
    check(q.is_contiguous(), "only support Q.is_contiguous() for now")
    check(q.shape[2] == buffer.shape[3], "only support head_size == KV.size(3) for now")
    check(q.dtype in (torch.bfloat16, fp8_dtype()), f"unsupport Q dtype:{q.dtype}")
    check(buffer.dtype in (torch.bfloat16, fp8_dtype()), f"unsupport KV dtype:{buffer.dtype}")
    check(q.shape[1] in heads, f"cannot get heuristic kernel! gqa_ratio:{q.shape[1]}")
    check(q.dtype == torch.bfloat16 or None not in (q_scale, kv_scale), "fp8 Q requires q_scale and kv_scale")
    fp8_kv = buffer.dtype != torch.bfloat16
    scales = (one_number(q_scale), one_number(kv_scale) if fp8_kv else 1.0)
    o.copy_(
        latent_rows(
            q,
            buffer,
            cu_q,
            indptr,
            indices,
            rank=o.shape[2],
            scale=q.shape[2] ** -0.5 if scale is None else scale,
            max_q=int(max_q),
            scales=scales,
        )
    )
    scratch = torch.full((*q.shape[:2],), math.nan)
    return torch.full((q.shape[0], 1, q.shape[1], o.shape[2]), math.nan), scratch


def mla_prefill_fwd(
    q: Any, kv_buffer: Any, o: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_lens: Any,
    max_seqlen_q: Any, sm_scale: Any = None, logit_cap: Any = 0.0, num_kv_splits: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of both builds (`mla_prefill_asm_fwd` in csrc/py_itfs_cu/asm_mla.cu): bf16 alone, 16 or 128 heads."""
    check(q.dtype == torch.bfloat16 == kv_buffer.dtype, f"unsupport current Q_type:{q.dtype}")
    check(o.is_contiguous(), "view size is not compatible with input tensor's size and stride")
    return latent(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, max_seqlen_q, sm_scale, logit_cap, None, None,
        None, (16, 128),
    )  # fmt: skip
