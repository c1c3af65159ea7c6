"""Stand-ins for FlashInfer's trtllm-gen and XQA functions of dense models (0.7.2.post1: `decode.py`,
`prefill.py`, `xqa.py`)."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_blocks import (
    Blocks,
    Result,
    attend_blocks,
    caches_of,
    check_trtllm,
    finish,
    number,
)
from anyattn.testing.emulators.flashinfer_common import (
    FP8,
    LOG2E,
    check_like,
    chip,
    contiguous_view,
    use_workspace,
)
from anyattn.testing.emulators.modules import EmulationError

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]

_SEMAPHORES = 8 << 20  # bytes of XQA's workspace that must be zero
_XQA_PAGES = (16, 32, 64, 128)
_XQA_TILE = 32  # rows of a program, of all tokens and heads of a group (defines.h: M_TILESIZE)


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
) -> Any:
    """One or more tokens a request: trtllm-gen on SM100 and SM103, XQA elsewhere."""
    extra = (kv_cache_sf, bmm1_scale_log2, causal_seqlens_kv_global, request_order, o_sf_scale)
    if any(value is not None for value in extra) or enable_block_sparse_attention:
        raise EmulationError("trtllm_batch_decode_with_kv_cache", asked="an option without a stand-in")
    if backend == "auto":
        backend = "trtllm-gen" if chip() // 10 == 10 else "xqa"
    if backend == "xqa":
        if max_q_len is not None or cum_seq_lens_q is not None:
            raise ValueError("xqa backend does not support cum_seq_lens_q")
        if return_lse or lse is not None:
            raise NotImplementedError("xqa backend does not support return_lse/lse output")
        kind = out_dtype or (query.dtype if out is None else out.dtype)
        out = torch.empty_like(query, dtype=kind) if out is None else out  # type: ignore[arg-type]
        return xqa_batch_decode_with_kv_cache(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale,
            window_left, out, sinks, kv_layout, enable_pdl, q_len_per_req, o_scale, mask,
        )  # fmt: skip
    if backend != "trtllm-gen":
        raise KeyError(f"Backend {backend} not supported")
    k, v = caches_of(kv_cache, kv_layout)
    check_trtllm(query, k, v)
    spans = _decode_spans(query, q_len_per_req, cum_seq_lens_q)
    if cum_seq_lens_q is not None and q_len_per_req is None:
        assert max_q_len is not None
    softmax.check(block_tables.shape[0] == len(spans) == len(seq_lens), "batch sizes disagree")
    result = attend_blocks(
        query, spans, Blocks(k, v, block_tables, seq_lens, max_seq_len), number(bmm1_scale, "bmm1_scale"),
        left=window_left, sinks=_sinks(sinks),
    )  # fmt: skip
    _bound_queries(result, spans, max_q_len)
    use_workspace(workspace_buffer)
    return _finished(result, query, v, out, out_dtype, number(bmm2_scale, "bmm2_scale"), lse, return_lse)


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Any:
    """Prefill over pages; `cum_seq_lens_kv` counts tokens."""
    if backend != "trtllm-gen" or kv_cache_sf is not None or o_sf_scale is not None:
        raise EmulationError("trtllm_batch_context_with_kv_cache", asked=backend, allowed="trtllm-gen")
    if not causal and window_left >= 0:
        raise NotImplementedError("Sliding-window non-causal attention is not supported for trtllm-gen")
    k, v = caches_of(kv_cache, kv_layout)
    check_trtllm(query, k, v)
    spans = softmax.offsets(cum_seq_lens_q)
    softmax.check(batch_size == len(spans) == block_tables.shape[0] == len(seq_lens), "batch sizes disagree")
    result = attend_blocks(
        query, spans, Blocks(k, v, block_tables, seq_lens, max_kv_len), number(bmm1_scale, "bmm1_scale"),
        left=window_left, causal=causal, sinks=_sinks(sinks),
    )  # fmt: skip
    lengths = [stop - start for start, stop in softmax.offsets(cum_seq_lens_kv)]
    if lengths != seq_lens.tolist():
        result.out.fill_(torch.nan)
    _bound_queries(result, spans, max_q_len)
    use_workspace(workspace_buffer)
    return _finished(result, query, v, out, out_dtype, number(bmm2_scale, "bmm2_scale"), lse, return_lse)


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """XQA: no LSE; more than one token needs a packed draft mask; 8 MB of the workspace must be zero.

    `max_seq_len` isn't used: the width of the table is the bound.
    """
    if kv_cache_sf is not None:
        raise EmulationError("xqa_batch_decode_with_kv_cache", asked="NVFP4")
    k, v = caches_of(kv_cache, kv_layout)
    _check_xqa(query, k, v, workspace_buffer)
    q_len = int(q_len_per_req or 1)
    spans = _xqa_spans(query, seq_lens, q_len, q_cu_seq_lens)
    softmax.check(len(spans) == len(seq_lens) == block_tables.shape[0], "batch sizes disagree")
    masks, tails = None, _sinks(sinks)
    if q_len > 1:
        tails = _tiled(tails, query, spans, query.shape[1] // k.shape[2])
        assert mask is not None, "Mask is required for speculative decoding"
        rows = mask.reshape(query.shape[0], -1)
        masks = [_draft_mask(rows[start:stop], q_len)[:, : stop - start] for start, stop in spans]
    width = block_tables.shape[1] * k.shape[1]
    # One scale for K and V, read for 8-bit caches alone; `q_scale` is divided by it all the same.
    factor = number(bmm2_scale, "bmm2_scale") if k.dtype.itemsize < 2 else 1.0
    scale = number(bmm1_scale, "bmm1_scale") / number(bmm2_scale, "bmm2_scale") * factor
    queries = contiguous_view(query)
    if chip() // 10 == 9 and q_len == 1 and k.dtype == FP8[0]:  # mha_sm90.cu multiplies 8-bit numbers
        queries = queries.to(FP8[0]).to(query.dtype)
    result = attend_blocks(
        queries, spans, Blocks(k, v, block_tables, seq_lens, width),
        scale, left=window_left, sinks=tails, masks=masks,
    )  # fmt: skip
    _bound_queries(result, spans, q_len)
    if bool(workspace_buffer.view(torch.uint8)[:_SEMAPHORES].any()):
        result.out.fill_(torch.nan)
    out = torch.empty_like(query) if out is None else out
    return finish(result, tuple(query.shape), out, out.dtype, factor)


def _check_xqa(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, workspace: torch.Tensor) -> None:
    if chip() // 10 not in (9, 10, 12):
        raise RuntimeError("XQA is only supported on SM90, SM100, SM120/SM121 GPUs")
    dim, page, group = query.shape[-1], k.shape[1], query.shape[1] // k.shape[2]
    halves = (torch.float16, torch.bfloat16)
    softmax.check(query.dtype in halves and k.dtype in (query.dtype, FP8[0], torch.int8), "XQA: dtypes")
    softmax.check(dim % 16 == 0 and 16 <= dim <= 512 and v.shape[-1] == dim, f"XQA: head size {dim}")
    softmax.check(page in _XQA_PAGES, f"XQA: page size {page}")
    softmax.check(dim <= 256 or group <= 16, f"XQA: group of {group} at head size {dim}")
    softmax.check(
        workspace.numel() * workspace.element_size() > _SEMAPHORES, "XQA: workspace of 8 MB and more"
    )


def _xqa_spans(
    query: torch.Tensor, seq_lens: torch.Tensor, q_len: int, cum: torch.Tensor | None
) -> list[tuple[int, int]]:  # fmt: skip
    """Rows of each request; `q_len` is the largest number of them in a ragged call, and of all in another."""
    if cum is None:
        return [(i * q_len, (i + 1) * q_len) for i in range(query.shape[0] // q_len)]
    assert q_len > 1, "q_cu_seq_lens requires q_seq_len > 1 (the max draft len)"
    assert cum.dtype in (torch.int32, torch.uint32), "q_cu_seq_lens must be int32 or uint32"
    assert cum.dim() == 1, "q_cu_seq_lens must be a contiguous 1-D tensor"
    assert cum.is_contiguous(), "q_cu_seq_lens must be a contiguous 1-D tensor"
    assert cum.numel() == seq_lens.shape[0] + 1, "q_cu_seq_lens must have batch_size + 1 entries"
    return softmax.offsets(cum)


def _tiled(
    sinks: torch.Tensor | None, query: torch.Tensor, spans: list[tuple[int, int]], group: int
) -> torch.Tensor | None:  # fmt: skip
    """Sinks `[T, Hq]` as drafts get them: `mha.cu` counts heads from the start of each tile of rows, which is
    the head's own number only where tiles begin with the first head (or there is only one)."""
    if sinks is None:
        return None
    row = torch.cat([torch.arange((stop - start) * group).view(-1, group) for start, stop in spans])
    head = row % _XQA_TILE % group
    first = torch.arange(0, query.shape[1], group)[None, :, None]
    return sinks[first + head[:, None, :]].reshape(row.shape[0], query.shape[1])


def _draft_mask(rows: torch.Tensor, q_len: int) -> torch.Tensor:
    """Bool `[rows, q_len]` from uint16 words, 32 bits aligned, low bit first."""
    softmax.check(rows.dtype == torch.uint16, f"XQA: mask of {rows.dtype}, uint16 is read")
    softmax.check(rows.shape[1] == (q_len + 31) // 32 * 2, "XQA: words of a mask row")
    words = rows.to(torch.int32)
    bits = torch.arange(q_len)
    return ((words[:, bits // 16] >> (bits % 16)) & 1).bool()


def _sinks(sinks: Any) -> torch.Tensor | None:
    if sinks is None:
        return None
    if not torch.is_tensor(sinks):
        raise TypeError("Mismatched type on argument attention_sinks: expected Tensor")
    softmax.check(sinks.dtype == torch.float32, "attention_sinks must be a float tensor")
    return sinks.reshape(-1)


def _decode_spans(
    query: torch.Tensor, q_len: int | None, cum: torch.Tensor | None
) -> list[tuple[int, int]]:  # fmt: skip
    if q_len is not None:
        return [(i * q_len, (i + 1) * q_len) for i in range(query.shape[0] // q_len)]
    assert cum is not None
    return softmax.offsets(cum)


def _bound_queries(result: Result, spans: list[tuple[int, int]], max_q_len: int | None) -> None:
    if max_q_len is not None and any(stop - start > max_q_len for start, stop in spans):
        result.out.fill_(torch.nan)


def _finished(
    result: Result, query: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    out_dtype: torch.dtype | str | None, factor: float, lse: torch.Tensor | None, return_lse: bool,
) -> Any:  # fmt: skip
    if isinstance(out_dtype, str):
        raise EmulationError("out_dtype", asked=out_dtype, allowed="a torch dtype")
    dtype = out_dtype or (query.dtype if out is None else out.dtype)
    if dtype not in (query.dtype, torch.float16, torch.bfloat16):
        raise ValueError(f"Unsupported out_dtype: {dtype}")
    done = finish(result, (*query.shape[:2], v.shape[-1]), out, dtype, factor)
    if lse is None and not return_lse:
        return done
    lse = torch.empty(query.shape[:2], dtype=torch.float32) if lse is None else lse
    check_like(lse, query.shape[:2], torch.float32, "lse")
    lse.copy_(result.lse * LOG2E)
    return (done, lse) if return_lse else done
