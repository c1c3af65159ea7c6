"""Stand-in for tokenspeed-mla 2.0.4, `tokenspeed_mla`: CuTe kernels for latents on SM100, SM103 and SM107.

From `tokenspeed_mla/{mla_decode,mla_helpers,mla_prefill}.py` and the paging of `mla_decode_fp16.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.softmax import attend, band, gather, offsets

__all__ = ["modules", "tokenspeed_mla_decode", "tokenspeed_mla_prefill", "workspace_bytes"]

Tensor = torch.Tensor
_FP8 = torch.float8_e4m3fn
_TILE = 128
_SMS = 148
_INT32_LIMIT = 1 << 31


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules. On chips other than SM10x the names exist and the call fails, as in the library."""
    functions = {
        "tokenspeed_mla_decode": tokenspeed_mla_decode,
        "tokenspeed_mla_prefill": tokenspeed_mla_prefill,
        "warmup_compile_prefill": warmup_compile_prefill,
        "get_num_sm": get_num_sm,
    }
    decode = {"tokenspeed_mla_decode": tokenspeed_mla_decode}
    return module_tree({"tokenspeed_mla": functions, "tokenspeed_mla.mla_decode": decode, "cutlass": {}})


def get_num_sm(device: Any) -> int:
    """SMs of the emulated chip."""
    return _SMS


def warmup_compile_prefill(
    q_dtype: torch.dtype = _FP8, d_qk: int = 192, d_v: int = 128, enable_pdl: bool = False
) -> None:
    """Compiles one prefill kernel: nothing to do here."""


def tokenspeed_mla_decode(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, kv_lora_rank: int, qk_rope_head_dim: int,
    block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, softmax_scale: float, output_scale: float = 1.0,
    out: Tensor | None = None, is_var_seq: bool = True, causal_mask: bool = True, window_left: int = -1,
    enable_pdl: bool = False, return_lse: bool = False, causal_seqs: Tensor | None = None, cp_world: int = 1,
    cp_rank: int = 0, cp_interleave_size: int = 1, *, min_split_kv: int = 1,
    local_visible_lens: Tensor | None = None,
) -> Any:  # fmt: skip
    """Out `[B, q, H, 512]`, with `return_lse` also the base-2 LSE `[B, q, H]`.

    Tiles of 128 keys are loaded whole, pages behind the table's width as page 0: NaN in what the tail of the
    last tile covers comes out. FP8 inputs give bf16; scales of fp8 belong in `softmax_scale` and
    `output_scale`.

    Raises:
        AssertionError, ValueError: what the library refuses.
        EmulationError: context parallelism and other things that this stand-in doesn't know.
    """
    if cp_world != 1 or causal_seqs is not None or local_visible_lens is not None:
        raise EmulationError("context parallelism isn't emulated", asked=cp_world, allowed="cp_world=1")
    if kv_cache.dim() == 4:
        kv_cache = kv_cache.squeeze(1)
    batch, rows, heads, _ = query.shape
    _check(query, kv_cache, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens)
    if max_seq_len <= 0:
        raise ValueError(f"max_seq_len must be > 0, got {max_seq_len}")
    if window_left < -1 or 0 <= window_left < rows - 1:
        raise ValueError(f"window_left={window_left} must be -1 or >= {rows - 1}")
    _check_workspace(query, workspace_buffer, kv_lora_rank, max_seq_len, window_left, min_split_kv)
    result = torch.full((batch, rows, heads, kv_lora_rank), math.nan, dtype=torch.float64)
    lse = torch.full((batch, rows, heads), math.nan, dtype=torch.float64)
    for index, length in enumerate(int(n) for n in seq_lens.tolist()):
        keys = _tiles(kv_cache, block_tables[index], length).double()[:, None]
        seen = band(rows, keys.shape[0], window_left, 0 if causal_mask else -1, last=length - 1)
        seen[:, length:] = False
        result[index], lse[index] = attend(
            query[index], keys, keys[..., :kv_lora_rank], seen, scale=softmax_scale, poisoned=True
        )
        if length > max_seq_len:  # splits are laid out for the caller's bound
            result[index], lse[index] = math.nan, math.nan
    dtype = torch.bfloat16 if query.dtype == _FP8 else query.dtype
    done = (result * output_scale).to(dtype)
    done = done if out is None else out.copy_(done)
    return (done, (lse / math.log(2)).to(torch.float32)) if return_lse else done


def _tiles(cache: Tensor, row: Tensor, length: int) -> Tensor:
    """The latents of whole tiles, `[n, D]`."""
    page = cache.shape[1]
    entries = -(-length // _TILE) * _TILE // page
    behind = torch.zeros(max(entries - row.shape[0], 0), dtype=row.dtype, device=row.device)
    gather(cache, row, length)  # the request's own pages must lie in the table and the pool
    return gather(cache, torch.cat([row, behind]), entries * page)


def _check(q: Tensor, cache: Tensor, rank: int, rope: int, table: Tensor, lengths: Tensor) -> None:
    chip = (current_host() or "cuda:sm100").partition(":")[2]
    if not chip.startswith(("sm100", "sm103", "sm107")):
        raise ValueError(f"tokenspeed_mla_decode: unsupported device {chip}")
    assert q.dtype in (torch.float16, torch.bfloat16, _FP8), f"only fp16, bf16 and fp8, got {q.dtype}"
    assert cache.dtype == q.dtype, f"kv_cache dtype {cache.dtype} must match query dtype {q.dtype}"
    assert q.shape[3] == rank + rope, "query must end in kv_lora_rank + qk_rope_head_dim"
    page, heads = cache.shape[1], q.shape[2]
    if (rank, rope) != (512, 64) or page == 1 or _TILE % page or not 0 < heads <= 128:
        raise ValueError(
            f"tokenspeed_mla_decode: unsupported configuration (q_len={q.shape[1]}, num_heads={heads}, "
            f"page_size={page}, dtype={q.dtype})"
        )
    assert table.dtype == torch.int32, "block_tables must be int32"
    assert table.shape[0] == q.shape[0], "block_tables must have one row per request"
    assert lengths.shape == (q.shape[0],), "seq_lens must have one entry per request"


def _check_workspace(
    q: Tensor, workspace: Tensor, rank: int, max_seq_len: int, window_left: int, min_split_kv: int
) -> None:
    if not 1 <= min_split_kv <= 256:
        raise ValueError("min_split_kv must be an integer in [1, 256]")
    if window_left >= 0:
        max_seq_len = min(max_seq_len, window_left + q.shape[1])
    batch, rows, heads = q.shape[:3]
    fp8 = q.dtype == _FP8
    needed = workspace_bytes(batch, rows, heads, rank, max_seq_len, fp8=fp8, splits=min_split_kv)
    assert workspace.dtype == torch.int8, f"workspace_buffer must be torch.int8, got {workspace.dtype}"
    assert workspace.numel() >= needed, (
        f"workspace_buffer too small: {workspace.numel()}, need {needed} bytes"
    )


def workspace_bytes(
    batch: int, rows: int, heads: int, rank: int, max_seq_len: int, *, fp8: bool, splits: int = 1
) -> int:
    """Bytes that a decode step needs on the emulated chip."""
    small = fp8 and heads * rows <= 64
    tile = 64 if small else _TILE
    fold = next((f for f in range(min(rows, tile // heads), 1, -1) if rows % f == 0), 1)
    tall, deep = heads * fold, rows // fold
    if tile == _TILE and -(-heads * rows // tile) < deep:
        tall, deep = tile, -(-heads * rows // tile)
    key_tiles = -(-max_seq_len // _TILE)
    if small:
        waves = -(-key_tiles // min(key_tiles, max(1, _SMS // batch // deep)))
        found = min(-(-key_tiles // waves), 64)
    else:
        found = min(max(1, _SMS // batch // (deep * 2)), 32)
    found = max(found, splits)
    if fp8:
        found = -(-key_tiles // -(-key_tiles // found))
    size = 0 if found == 1 else batch * tall * deep * found * (rank + 1) * 4
    if splits > 1 and size >= _INT32_LIMIT:
        raise ValueError("min_split_kv requires workspace beyond the Int32 offset limit")
    return size


def tokenspeed_mla_prefill(
    query: Tensor, key: Tensor, value: Tensor, seq_lens: Tensor, cum_seq_lens: Tensor, max_seq_len: int,
    batch_size: int, softmax_scale: float, is_causal: bool = True, return_lse: bool = False,
    cum_seq_lens_q: Tensor | None = None, max_seq_len_q: int | None = None, enable_pdl: bool = False,
    out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Ragged attention on materialised heads: always bf16 `[T, Hq, Dv]`; LSE `[T, Hq]`, natural-log here.

    Raises:
        ValueError, TypeError: an `out` that doesn't fit.
    """
    shape = (query.shape[0], query.shape[1], value.shape[2])
    if out is not None and out.shape != shape:
        raise ValueError(f"out shape must be {shape}, got {tuple(out.shape)}")
    if out is not None and out.dtype != torch.bfloat16:
        raise TypeError(f"out dtype must be torch.bfloat16, got {out.dtype}")
    if out is not None and not out.is_contiguous():
        raise ValueError("out must be contiguous")
    result = torch.full(shape, math.nan, dtype=torch.float64)
    lse = torch.full(shape[:2], math.nan, dtype=torch.float64)
    keys = offsets(cum_seq_lens)[:batch_size]
    queries = keys if cum_seq_lens_q is None else offsets(cum_seq_lens_q)[:batch_size]
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        seen = band(q1 - q0, k1 - k0, -1, 0 if is_causal else -1)
        own = (query[q0:q1], key[k0:k1], value[k0:k1])
        result[q0:q1], lse[q0:q1] = attend(*own, seen, scale=softmax_scale)
    done = result.to(torch.bfloat16)
    done = done if out is None else out.copy_(done)
    return (done, lse.to(torch.float32)) if return_lse else done
