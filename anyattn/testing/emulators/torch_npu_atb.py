"""ATB's operators under `torch_npu._npu_*`: paged attention, its splitfuse form and flash attention, as both
engines call them. From `op_plugin/atb/_atb_api_docs.py` of torch-npu 2.13, vllm-ascend's 310P backend and
vendor-apis §8.3.

None of them masks by itself: a mask is added to the scores. Where a length lies (host or device) can't be
told on a CPU. Engines pad graphs with requests of length 0, so those answer 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import attend, check
from anyattn.testing.emulators.torch_npu_caches import chip, nz_mask, plain_cache, rows_of

__all__ = ["flash_attention", "paged_attention", "splitfuse"]

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
_HIDDEN = -1e3  # engines write -inf or -10000; numbers between would be biases


def _check_call(call: Mapping[str, Any], key: Tensor, value: Tensor) -> None:
    query, heads, kv_heads = call["query"], call["num_heads"], call["num_kv_heads"]
    dtypes = (torch.float16,) if chip() == "310p" else HALVES
    check(query.dtype in dtypes, f"query's dtype {query.dtype} isn't supported on {chip()}")
    check(query.dtype == key.dtype == value.dtype, "query, key and value differ in dtype")
    check(query.dim() == 3 and query.shape[1] == heads, f"query {list(query.shape)} isn't [T, {heads}, D]")
    check(kv_heads > 0 and heads % kv_heads == 0, f"{heads} heads aren't shared by {kv_heads}")
    check(0 < query.shape[2] <= 256, f"head_size {query.shape[2]} isn't in (0, 256]")
    check(query.shape[2] == key.shape[-1], f"head_size {query.shape[2]}, the cache's is {key.shape[-1]}")
    out = call["out"]
    check(out.shape == (*query.shape[:2], value.shape[-1]), f"out {list(out.shape)} isn't the query's shape")
    check(out.dtype == query.dtype and out.is_contiguous(), "out must be contiguous, of the query's dtype")


def _lengths(x: Tensor, name: str) -> list[int]:
    check(x.dtype == torch.int32 and x.dim() == 1, f"{name} must be int32 with one axis, not {x.dtype}")
    return [int(n) for n in x.tolist()]


def _paged(call: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Keys and values of each request, and their numbers."""
    caches = [plain_cache(call[n], call["num_kv_heads"]) for n in ("key_cache", "value_cache")]
    _check_call(call, *caches)
    page, dim = caches[0].shape[1], caches[0].shape[3]
    check(page % 16 == 0 and page <= 128, f"block_size {page} isn't a multiple of 16 up to 128")
    check(page * dim <= 128 * 128, f"block_size * head_size {page * dim} is above 128 * 128")
    lengths = _lengths(call["context_lens"], "context_lens")
    check(chip() != "310p" or 0 < len(lengths) <= 2048, f"batch {len(lengths)} isn't in (0, 2048]")
    keys, values = (rows_of(cache, call["block_table"], lengths) for cache in caches)
    return keys, values, lengths


def paged_attention(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`_npu_paged_attention`: one query a request, all of its keys."""
    keys, values, lengths = _paged(call)
    query, out = call["query"], call["out"]
    check(query.shape[0] == len(lengths), f"{query.shape[0]} queries of {len(lengths)} requests")
    for index, length in enumerate(lengths):
        own = slice(index, index + 1)
        seen = torch.ones(1, length, dtype=torch.bool)
        found, _ = attend(query[own], keys[index], values[index], seen, scale=call["scale_value"])
        out[own] = found.to(out.dtype)
    return ()


def splitfuse(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`_npu_paged_attention_splitfuse`: `seq_len` queries a request of `context_lens` keys in all; a row of
    the mask belongs to a token of the step."""
    keys, values, lengths = _paged(call)
    rows = _lengths(call["seq_len"], "seq_len")
    check(len(rows) == len(lengths), f"{len(rows)} of seq_len for {len(lengths)} of context_lens")
    query, out = call["query"], call["out"]
    check(sum(rows) == query.shape[0], f"seq_len adds up to {sum(rows)}, {query.shape[0]} queries are given")
    mask = nz_mask(call["mask"], max(lengths, default=0))
    check(mask.dtype == query.dtype, f"mask's dtype {mask.dtype} isn't the query's")
    check(mask.shape[0] >= query.shape[0], f"a mask of {mask.shape[0]} rows for {query.shape[0]} queries")
    start = 0
    for index, count in enumerate(rows):
        own = slice(start, start + count)
        seen = _visible(mask[own, : lengths[index]])
        found, _ = attend(query[own], keys[index], values[index], seen, scale=call["scale_value"])
        found[~seen.any(1)] = math.nan if lengths[index] else 0.0
        out[own] = found.to(out.dtype)
        start += count
    return ()


def flash_attention(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`_npu_flash_attention`: prompts without a prefix over contiguous keys, `seq_len` tokens each; on 310P
    padded to a multiple of 16 in all. The mask serves every request from its first token."""
    query, key, value, out = call["query"], call["key"], call["value"], call["out"]
    _check_call(call, key, value)
    check(key.shape[:2] == value.shape[:2] == (query.shape[0], call["num_kv_heads"]), "key isn't [T, Hkv, D]")
    lengths = _lengths(call["seq_len"], "seq_len")
    total = sum(lengths)
    tokens = -(-total // 16) * 16 if chip() == "310p" else total
    check(query.shape[0] == tokens, f"{query.shape[0]} tokens, seq_len adds up to {total}")
    longest = max(lengths, default=0)
    mask = nz_mask(call["mask"], longest)
    check(mask.dtype == query.dtype, f"mask's dtype {mask.dtype} isn't the query's")
    check(mask.shape[0] >= longest, f"a mask of {mask.shape[0]} rows for {longest} tokens")
    out[total:] = math.nan
    start = 0
    for count in lengths:
        own = slice(start, start + count)
        seen = _visible(mask[:count, :count])
        out[own] = attend(query[own], key[own], value[own], seen, scale=call["scale_value"])[0].to(out.dtype)
        start += count
    return ()


def _visible(mask: Tensor) -> Tensor:
    hidden = mask < _HIDDEN
    if bool((mask[~hidden] != 0).any()):
        raise EmulationError("masks that shift scores aren't emulated", asked="a bias", allowed="0 or -inf")
    return ~hidden
