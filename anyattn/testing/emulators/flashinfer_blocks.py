"""Block-table kernels of FlashInfer (trtllm-gen, XQA): tables, scales, queries of one call; no plan.

What the kernels don't check, or where they say nothing, comes out as NaN: a request without keys, a bound
(`max_seq_len`, `max_q_len`) that is too small, NaN in the unused tail of a last page, which is loaded whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import FP8, check_aligned, check_like, chip, put, token_major

__all__ = ["HEAD_DIMS", "Blocks", "Result", "attend_blocks", "caches_of", "check_trtllm", "finish", "number"]

HEAD_DIMS = (64, 80, 128, 256, 512)
"""Head sizes of trtllm-gen's kernels (vendor-apis 2.8)."""
_PAGES = (16, 32, 64, 128, 256, 512)


@dataclass
class Blocks:
    """`table [B, M]` of pages and `lens [B]` over caches `[N, P, Hkv, D]`."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    max_len: int

    def __post_init__(self) -> None:
        if self.table.ndim != 2:
            raise ValueError(f"block_tables must be 2D for shared paged KV layout, got {self.table.ndim}")
        for name, x in (("block_tables", self.table), ("seq_lens", self.lens)):
            softmax.check(x.dtype in (torch.int32, torch.uint32), f"{name}: {x.dtype}, int32 is read")

    def rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """K and V of whole pages `[m, H, D]`, and how many of them count; a too small bound gives NaN."""
        length = int(self.lens[index])
        page = self.k.shape[1]
        stop = -(-length // page) * page
        k, v = (softmax.gather(x, self.table[index], stop).to(torch.float64) for x in (self.k, self.v))
        if length > self.max_len:
            k = torch.full_like(k, torch.nan)
        return k, v, length


@dataclass
class Result:
    """`out [T, Hq, Dv]` and natural LSE `[T, Hq]` in float64."""

    out: torch.Tensor
    lse: torch.Tensor


def caches_of(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-major caches from a pair, or from one tensor whose second axis is K and V.

    V is read with the strides of K, so other ones are refused here.
    """
    if isinstance(kv_cache, tuple):
        k, v = kv_cache
    elif kv_cache.shape[1] == 1:
        k = v = kv_cache
    else:
        assert kv_cache.shape[1] == 2, "the second dimension must be 1 or 2"
        k, v = kv_cache.unbind(dim=1)
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")
    softmax.check(k.stride() == v.stride(), "V is read with K's strides")
    for name, x in (("k_cache", k), ("v_cache", v)):
        check_aligned(name, x)
    return token_major(k, kv_layout), token_major(v, kv_layout)


def number(value: float | torch.Tensor, name: str) -> float:
    """A scale: a float, or a float32 tensor with one element."""
    if isinstance(value, torch.Tensor):
        assert value.dtype == torch.float32, name
        return float(value)
    return float(value)


def check_trtllm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """trtllm-gen's limits. Raises `RuntimeError` where no kernel is found."""
    softmax.check(chip() in (100, 103), f"trtllm-gen: Unsupported architecture sm{chip()}")
    dim, page = q.shape[-1], k.shape[1]
    softmax.check(dim in HEAD_DIMS and v.shape[-1] == dim, f"Missing TRTLLM-GEN kernel: head size {dim}")
    softmax.check(page in _PAGES, f"Missing TRTLLM-GEN kernel: page size {page}")
    halves = (torch.float16, torch.bfloat16)
    pair = (q.dtype, k.dtype)
    served = pair in ((torch.bfloat16, FP8[0]), (FP8[0], FP8[0])) or (
        q.dtype in halves and pair[0] == pair[1]
    )
    softmax.check(served, f"Missing TRTLLM-GEN kernel: {pair}")
    softmax.check(q.shape[1] % k.shape[2] == 0, "num_qo_heads must be a multiple of num_kv_heads")
    check_aligned("query", q)


def attend_blocks(
    q: torch.Tensor, spans: list[tuple[int, int]], blocks: Blocks, scale: float, *, left: int,
    causal: bool = True, sinks: torch.Tensor | None = None, masks: list[torch.Tensor] | None = None,
) -> Result:  # fmt: skip
    """Every request's queries, right-aligned at the end of its keys; `masks` say which of the step's own
    keys a row sees, in place of the causal rule; `sinks`: `[Hq]`, or `[T, Hq]` where rows have their own."""
    shape = (*q.shape[:2], blocks.v.shape[-1])
    out = torch.full(shape, math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for index, (start, stop) in enumerate(spans):
        k, v, length = blocks.rows(index)
        if not length or stop <= start:
            continue
        seen = torch.zeros(stop - start, k.shape[0], dtype=torch.bool)
        right = 0 if causal and masks is None else -1
        seen[:, :length] = softmax.band(stop - start, length, left, right)
        if masks is not None:
            seen[:, length - (stop - start) : length] &= masks[index]
        tail = torch.zeros(k.shape[0], dtype=torch.bool)
        tail[length:] = True
        v = torch.where((seen.any(0) | tail)[:, None, None], v, 0.0)
        own = sinks if sinks is None or sinks.ndim == 1 else sinks[start:stop]
        rows = softmax.attend(q[start:stop], k, v, seen, scale=scale, sinks=own, poisoned=True)
        out[start:stop], lse[start:stop] = rows
    return Result(out, lse)


def finish(
    result: Result, shape: tuple[int, ...], out: torch.Tensor | None, dtype: torch.dtype, factor: float
) -> torch.Tensor:
    """The output, scaled, written without strides."""
    out = torch.empty(shape, dtype=dtype) if out is None else out
    check_like(out, shape, dtype, "out")
    put(out, result.out.reshape(shape) * factor, strided=False)
    return out
