"""Stand-ins for FlashInfer's MLA functions without a plan (0.7.2.post1: `mla/_core.py`, `prefill.py`)."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_blocks import Blocks, Result, attend_blocks, finish, number
from anyattn.testing.emulators.flashinfer_common import (
    FP8,
    LOG2E,
    check_aligned,
    check_like,
    chip,
    contiguous_view,
    use_workspace,
)
from anyattn.testing.emulators.modules import EmulationError

__all__ = ["trtllm_batch_decode_with_kv_cache_mla", "trtllm_ragged_attention_deepseek"]

_LATENTS = ((512, 64), (256, 64))
_RAGGED = ((192, 128), (128, 128), (256, 256))


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Absorbed decode on SM100 and SM103: query `[B, q, H, 576]`, or `[T, H, 576]` with `cum_seq_lens_q`."""
    if sparse_mla_top_k or enable_dcp or skip_softmax_threshold_scale_factor is not None:
        raise EmulationError("trtllm_batch_decode_with_kv_cache_mla", asked="sparse, DCP or skip-softmax")
    if return_lse_base not in (None, "basee", "base2"):
        raise ValueError(f"return_lse_base must be 'basee', 'base2', or None; got {return_lse_base!r}")
    if max_q_len is not None and cum_seq_lens_q is None:
        raise ValueError("max_q_len is only supported when cum_seq_lens_q is provided")
    if backend == "auto" and chip() not in (100, 103):
        backend = "xqa"
    if backend not in ("auto", "trtllm-gen", "cute-dsl", "xqa"):
        raise EmulationError("MLA decode backend", asked=backend, allowed="auto, trtllm-gen, cute-dsl, xqa")
    if seq_lens is None:
        raise ValueError("seq_lens is required for trtllm-gen and cute-dsl MLA backends")
    cache = _latent_cache(kv_cache, kv_lora_rank, qk_rope_head_dim, query.shape[-1])
    if backend == "xqa":
        if cum_seq_lens_q is not None:
            raise ValueError("XQA MLA does not support cum_seq_lens_q / max_q_len")
        if sinks is not None:
            raise ValueError("XQA MLA does not support sinks")
        if return_lse or lse is not None:
            raise NotImplementedError("XQA MLA backend does not support return_lse/lse output")
        blocks = _blocks(cache, kv_lora_rank, block_tables, seq_lens, cache.shape[1] * block_tables.shape[1])
        scales = number(bmm1_scale, "bmm1_scale"), number(bmm2_scale, "bmm2_scale")
        return _xqa(query, blocks, workspace_buffer, kv_lora_rank, scales, out)
    heads, page = query.shape[-2], cache.shape[1]
    chosen = _choose(backend, query, cache, heads, page, return_lse or lse is not None, return_lse_base)
    ragged = cum_seq_lens_q is not None
    _check_table(block_tables, page, aligned=chosen == "cute-dsl" or (backend == "auto" and not ragged))
    if ragged and chosen == "trtllm-gen" and (return_lse or lse is not None):
        raise NotImplementedError("trtllm-gen MLA does not support return_lse/lse with cum_seq_lens_q")
    spans = _spans(query, cum_seq_lens_q)
    if len(spans) != len(seq_lens) or len(spans) != block_tables.shape[0]:
        raise ValueError(f"Expected batch size {len(spans)} for query and block_table")
    flat = query.reshape(-1, heads, query.shape[-1])
    check_aligned("query", flat)
    blocks = _blocks(cache, kv_lora_rank, block_tables, seq_lens, max_seq_len)
    scale = number(bmm1_scale, "bmm1_scale")
    result = attend_blocks(flat, spans, blocks, scale, left=-1, sinks=_sink(sinks))
    if max_q_len is not None and any(stop - start > max_q_len for start, stop in spans):
        result.out.fill_(torch.nan)
    use_workspace(workspace_buffer)
    shape = (*query.shape[:-1], kv_lora_rank)
    done = finish(result, shape, out, torch.bfloat16, number(bmm2_scale, "bmm2_scale"))
    if not return_lse:
        return done
    base = return_lse_base or ("basee" if chosen == "cute-dsl" else "base2")
    return done, _lse(result, query, lse, base)


def _blocks(
    cache: torch.Tensor, rank: int, table: torch.Tensor, lens: torch.Tensor, bound: int
) -> Blocks:  # fmt: skip
    return Blocks(cache[:, :, None], cache[:, :, None, :rank], table, lens, bound)


def _xqa(
    query: torch.Tensor, blocks: Blocks, workspace: torch.Tensor, rank: int, scales: tuple[float, float],
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """SM12x: one token, 128 heads. The second scale is that of K and V: it counts in the logits as well. An
    `out` of the caller's has no axis for the token."""
    if chip() not in (120, 121):
        raise ValueError("XQA MLA requires SM120a (CUDA >= 12.8) or SM121a (CUDA >= 12.9)")
    if query.dtype != blocks.k.dtype or query.dtype not in (torch.bfloat16, FP8[0]):
        raise ValueError("XQA MLA supports (fp8, fp8) or (bfloat16, bfloat16) only")
    if query.shape[1] != 1:
        raise ValueError(f"XQA MLA only supports q_len_per_request == 1, got {query.shape[1]}")
    assert query.shape[2] == 128, "Only head group ratio 128 is supported for xqa MLA"
    if blocks.k.shape[1] not in (16, 32, 64, 128):
        raise ValueError(f"Invalid page_size: {blocks.k.shape[1]}, only 16, 32, 64, 128 are supported")
    _check_table(blocks.table, blocks.k.shape[1], aligned=True)
    flat = contiguous_view(query).reshape(-1, *query.shape[2:])
    spans = [(i, i + 1) for i in range(flat.shape[0])]
    result = attend_blocks(flat, spans, blocks, scales[0] * scales[1], left=-1)
    if bool(workspace.view(torch.uint8)[: 8 << 20].any()):
        result.out.fill_(torch.nan)
    shape = (flat.shape[0], flat.shape[1], rank)
    if out is None:
        return finish(result, shape, None, torch.bfloat16, scales[1]).unsqueeze(1)
    return finish(result, shape, out, torch.bfloat16, scales[1])


def _choose(
    backend: str, query: torch.Tensor, cache: torch.Tensor, heads: int, page: int, lse: bool, base: str | None
) -> str:
    """The kernel. With `auto` the tuner takes any that fits, and with it the base of the LSE."""
    softmax.check(chip() in (100, 103), f"MLA decode: Unsupported architecture sm{chip()}")
    trtllm = page in (32, 64) and not 64 < heads < 128
    cute = query.dtype == cache.dtype and query.dtype in (torch.float16, torch.bfloat16, FP8[0])
    cute = cute and heads <= 128 and page > 1 and 128 % page == 0
    if backend == "auto" and trtllm and cute and lse and base is None:
        raise EmulationError("the LSE's base depends on the tuner", asked="auto", hint="return_lse_base=…")
    if backend != "cute-dsl" and trtllm:
        served = query.dtype == cache.dtype or (query.dtype, cache.dtype) == (torch.bfloat16, FP8[0])
        softmax.check(served, f"Missing TRTLLM-GEN kernel: {query.dtype} over {cache.dtype}")
        return "trtllm-gen"
    if backend == "trtllm-gen" or not cute:
        raise ValueError(f"{backend}: not for {heads} heads, pages of {page}, {query.dtype}, {cache.dtype}")
    return "cute-dsl"


def _latent_cache(kv_cache: torch.Tensor, rank: int, rope: int, width: int) -> torch.Tensor:
    """`[N, P, rank + rope]` from `[N, P, ...]` or `[N, 1, P, ...]`."""
    if kv_cache.ndim not in (3, 4):
        raise ValueError(f"Expected kv_cache.ndim == 3 or 4, got {kv_cache.ndim}")
    if (rank, rope) not in _LATENTS:
        raise ValueError(f"Unsupported MLA dimensions, got kv_lora_rank={rank} and qk_rope_head_dim={rope}")
    if width != rank + rope or kv_cache.shape[-1] != rank + rope:
        raise ValueError(f"Expected head dim {rank + rope} for query and kv_cache")
    cache = kv_cache if kv_cache.ndim == 3 else kv_cache[:, 0]
    check_aligned("kv_cache", cache)
    return cache


def _check_table(table: torch.Tensor, page: int, *, aligned: bool) -> None:
    if aligned and table.shape[-1] % (128 / page):
        raise ValueError(f"Expected block_num % (128 / block_size) == 0, got block_num={table.shape[-1]}")


def _spans(query: torch.Tensor, cum: torch.Tensor | None) -> list[tuple[int, int]]:
    if cum is None:
        if query.ndim != 4:
            raise ValueError("batch_size and max_q_len are required when query.ndim == 3")
        return [(i * query.shape[1], (i + 1) * query.shape[1]) for i in range(query.shape[0])]
    if query.ndim != 3:
        raise ValueError("query must have shape [total_q, num_heads, head_dim_qk]")
    check_like(cum, cum.shape, torch.int32, "cum_seq_lens_q")
    return softmax.offsets(cum)


def _sink(sinks: Any) -> torch.Tensor | None:
    found = sinks[0] if isinstance(sinks, list | tuple) else sinks
    return found if found is None else found.reshape(-1)


def _lse(result: Result, query: torch.Tensor, lse: torch.Tensor | None, base: str) -> torch.Tensor:
    """`[B * q, H]`, or in the shape `[B, q, H]` of the caller's tensor."""
    heads = query.shape[-2]
    flat = (query.numel() // query.shape[-1] // heads, heads)
    lse = torch.empty(flat, dtype=torch.float32) if lse is None else lse
    if tuple(lse.shape) not in (flat, tuple(query.shape[:-1])):
        raise ValueError(f"lse must have shape {flat} or {tuple(query.shape[:-1])}; got {tuple(lse.shape)}")
    lse.view(flat).copy_(result.lse * (LOG2E if base == "base2" else 1.0))
    return lse


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[Any, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:
    """Materialised prefill, LSE in base 2. Requests without queries or keys are zero only where the call
    says their lengths (`q_seq_lens_cpu`, `kv_seq_lens_cpu`) or asks for the check; else they are garbage."""
    dims = (query.shape[2], value.shape[2])
    assert dims in _RAGGED, f"Unsupported head dimensions: {dims}"
    assert key.shape[2] == dims[0]
    softmax.check(chip() in (100, 103), f"trtllm-gen: Unsupported architecture sm{chip()}")
    if backend != "trtllm-gen" or any(x is not None for x in sage_attn_sfs):
        raise EmulationError("trtllm_ragged_attention_deepseek", asked=backend, allowed="trtllm-gen")
    if (q_seq_lens_cpu is None) != (kv_seq_lens_cpu is None):
        raise ValueError("q_seq_lens_cpu and kv_seq_lens_cpu must be provided together")
    spans, kv_spans = softmax.offsets(cum_seq_lens_q), softmax.offsets(cum_seq_lens_kv)
    softmax.check(batch_size == len(spans) == len(seq_lens), "batch sizes disagree")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_aligned(name, x)
    if attention_sinks is not None:
        softmax.check(attention_sinks.dtype == torch.float32, "attention_sinks must be a float tensor")
    compacts = q_seq_lens_cpu is not None or not skip_all_rows_active_check
    lens = [stop - start for start, stop in kv_spans]
    wrong = lens != seq_lens.tolist() or max(lens, default=0) > max_kv_len
    wrong |= any(stop - start > max_q_len for start, stop in spans)
    idle = any(b == a or not n for (a, b), n in zip(spans, lens, strict=True))
    if compacts and idle and attention_sinks is not None:
        raise ValueError("compacting empty KV rows: not with attention sinks")
    scale, empty = number(bmm1_scale, "bmm1_scale"), (0.0, -torch.inf) if compacts else (torch.nan, torch.nan)
    result = Result(
        torch.full((*query.shape[:2], dims[1]), empty[0], dtype=torch.float64),
        torch.full(query.shape[:2], empty[1], dtype=torch.float64),
    )
    for (start, stop), (first, last) in zip(spans, kv_spans, strict=True):
        if stop > start and last > first:
            seen = softmax.band(stop - start, last - first, window_left, 0 if is_causal else -1)
            rows = softmax.attend(
                query[start:stop], key[first:last], value[first:last], seen, scale=scale,
                sinks=attention_sinks,
            )  # fmt: skip
            result.out[start:stop], result.lse[start:stop] = rows
    if wrong:
        result.out.fill_(torch.nan)
    use_workspace(workspace_buffer)
    dtype = torch.bfloat16 if query.dtype in FP8 else query.dtype
    shape = (*query.shape[:2], dims[1])
    done = finish(result, shape, out, dtype if out is None else out.dtype, number(bmm2_scale, "bmm2_scale"))
    if not return_lse:
        return done
    lse = torch.empty(query.shape[:2], dtype=torch.float32) if lse is None else lse
    lse.copy_(result.lse * LOG2E)
    return done, lse
