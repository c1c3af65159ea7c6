"""Fused infer attention of torch-npu 2.13 on 910B and 910C, and its older sister for one query: what they
compute. From the documents in the wheel (`_op_plugin_docs.py`) and vendor-apis §8.2.

Where documents and engines disagree:

* TND with a block table isn't documented for A2 and A3; both engines serve from it, so it is taken. Its
  lengths of KV are per request then, cumulative without a table (both agree).
* `sparse_mode=3` in TND asks for fewer queries than keys; engines pass as many of both for a prompt without
  a prefix, so that is taken, more queries than keys isn't.
* TND is documented for bfloat16, D 128 or 192 and, in the first version, as many heads of K as of Q. The
  tiling function's own text names 64, 128, 192 and 192/128 (vllm-ascend#4020, #9632), engines share heads and
  pass the model's dtype: that is taken. Float16 in TND is proven by no document.
* The band: `pre_tokens` keys before the own one are seen, as the documents' sample mask says (vllm-ascend
  passes W, SGLang W - 1). With one query a request and layouts other than TND, masks and band are ignored as
  documented, though CANN's tiling does read `pre_tokens` there as a window; TND has no such rule.
* Blocks of the pool may be fewer than the requests' blocks together: prefixes are shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import attend, check
from anyattn.testing.emulators.torch_npu_caches import chip, pages, rows_of
from anyattn.testing.emulators.torch_npu_call import (
    FIA,
    ROPE,
    UNBOUNDED,
    check_call,
    checked_shape,
    value_dim,
)
from anyattn.testing.emulators.torch_npu_layouts import Shape, from_tokens, lengths_of, shape_of, to_tokens
from anyattn.testing.emulators.torch_npu_masks import seen_keys

__all__ = ["fused_infer", "incre", "infer_fused", "infer_incre"]

Tensor = torch.Tensor


# --- entries -----------------------------------------------------------------------------------------------


def infer_fused(call: Mapping[str, Any], v2: bool) -> Sequence[Tensor]:
    """Empty outputs of the right shapes; the LSE is one 0 unless asked for.

    Raises:
        RuntimeError: on 310P, which has no such operator.
    """
    check(chip() != "310p", "FusedInferAttentionScore isn't supported on Ascend310P")
    fia = FIA.of(call, v2)
    shape = checked_shape(fia)
    dim = shape.dim if fia.table is not None else value_dim(fia)
    out = torch.empty(shape.out(dim), dtype=fia.query.dtype)
    if not fia.lse:
        return out, torch.zeros(1, dtype=torch.float32)
    return out, torch.empty(shape.lse(), dtype=torch.float32)


def fused_infer(call: Mapping[str, Any], v2: bool) -> Sequence[Tensor]:
    """Both outputs of the operator."""
    fia = FIA.of(call, v2)
    out, lse = _computed(fia)
    return out, (lse if fia.lse else torch.zeros(1))


def _as_incre(call: Mapping[str, Any]) -> FIA:
    unknown = {"query", "key", "value", "actual_seq_lengths", "block_table", "num_heads", "scale_value"}
    unknown |= {"input_layout", "num_key_value_heads", "block_size", "inner_precise"}
    for name, value in call.items():
        if name not in unknown and value is not None:
            raise EmulationError(f"{name} isn't emulated", asked=name, allowed="None")
    count = call["num_heads"]
    return FIA(
        False, call["query"], call["key"], call["value"], None, None, None, None, call["actual_seq_lengths"],
        call["block_table"], count, call["num_key_value_heads"] or count, call["scale_value"], UNBOUNDED,
        UNBOUNDED, call["input_layout"], 0, call["block_size"], 0, False,
    )  # fmt: skip


def infer_incre(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """Like the query."""
    return (torch.empty_like(call["query"]),)


def incre(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`npu_incre_flash_attention`: one query a request, on 310P too; lengths are those of KV."""
    fia = _as_incre(call)
    check(fia.layout in ("BSH", "BNSD", "BSND"), f"input_layout {fia.layout} isn't supported")
    check(shape_of(fia.layout, fia.query, fia.heads).longest == 1, "query's S must be 1")
    return (_computed(fia)[0],)


# --- numbers -----------------------------------------------------------------------------------------------


def _computed(fia: FIA) -> tuple[Tensor, Tensor]:
    shape = checked_shape(fia)
    q_lens, kv_lens = lengths_of(shape, fia.q_lens, fia.kv_lens, fia.key, paged=fia.table is not None)
    check_call(fia, shape, q_lens)
    q = to_tokens(fia.layout, fia.query, fia.heads)
    keys, values = _keys(fia, shape, kv_lens)
    if fia.q_rope is not None:
        q = torch.cat([q, to_tokens(fia.layout, fia.q_rope, fia.heads)], dim=2)
    dim = values[0].shape[2] if values else shape.dim
    out = torch.full((*q.shape[:2], dim), math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for index, start in enumerate(shape.starts(q_lens)):
        own = slice(start, start + q_lens[index])
        seen = seen_keys(fia, index, q_lens[index], kv_lens[index], shape.longest)
        out[own], lse[own] = attend(q[own], keys[index], values[index], seen, scale=fia.scale, sinks=fia.sink)
        _invalid_rows(fia, seen, out[own], lse[own])
    return from_tokens(fia.layout, out, shape), shape.lse_of(lse)


def _invalid_rows(fia: FIA, seen: Tensor, out: Tensor, lse: Tensor) -> None:
    """Rows that no key is left for: 0 without keys at all or with `inner_precise` 2 and 3, else garbage. What
    their LSE is no document says."""
    empty = ~seen.any(1)
    if seen.shape[1] and fia.precise not in (2, 3):
        out[empty] = math.nan
    if fia.sink is None:
        lse[empty] = math.nan


def _keys(fia: FIA, shape: Shape, kv_lens: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    if fia.table is None:
        found = [shape.split_keys(fia.layout, x, fia.kv_heads, kv_lens) for x in (fia.key, fia.value)]
        if fia.k_rope is not None:
            rope = shape.split_keys(fia.layout, fia.k_rope, fia.kv_heads, kv_lens)
            found[0] = [torch.cat(pair, dim=2) for pair in zip(found[0], rope, strict=True)]
        return found[0], found[1]
    caches = [pages(x, fia.kv_heads, fia.layout, shape.dim) for x in (fia.key, fia.value)]
    keys, values = (rows_of(cache, fia.table, kv_lens) for cache in caches)
    if fia.k_rope is not None:
        rope = rows_of(pages(fia.k_rope, fia.kv_heads, fia.layout, ROPE), fia.table, kv_lens)
        keys = [torch.cat(pair, dim=2) for pair in zip(keys, rope, strict=True)]
    return keys, values
