"""Host side of the attention kernels: plain tensors in, launches out."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from anyattn.core.hashing import hashed_once
from anyattn.kernels.triton.configs import Decode, Extend
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.decode import decode_kernel
from anyattn.kernels.triton.extend import extend_kernel
from anyattn.kernels.triton.kv_write import kv_write_kernel
from anyattn.kernels.triton.launch import interpreting, launch
from anyattn.kernels.triton.merge import merge_kernel

__all__ = [
    "Cache",
    "ExtendStep",
    "Heads",
    "Variant",
    "decode",
    "decode_programs",
    "extend",
    "kv_write",
    "partials",
]


@dataclass(frozen=True, eq=False)
class Cache:
    """Paged K and V of one layer with their strides, whatever the layout.

    `k`, `v`: storage; strides in elements between pages, rows of a page and heads. `k_scale`, `v_scale`:
    float32 `[1]` or `[Hkv]` on the device. `slot_map`: int32 `[S]`, request tables list slots of another pool
    and `slot_map[slot]` is the one here; None = no translation. `run`: tokens that are sure to lie in
    consecutive slots (the table's granularity), 0 = a page.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    page: int
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    scaled: bool
    slot_map: torch.Tensor | None = None
    run: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)
    """Constexprs of this layer's launches: the same every step."""

    @cached_property
    def flat(self) -> bool:
        """Slot s lies at `s * row stride`."""
        return all(s[0] == s[1] * self.page for s in (self.k_strides, self.v_strides))

    @cached_property
    def scale_strides(self) -> tuple[int, int]:
        """Of k and v scales over heads: 0 where one scale serves all."""
        return int(self.k_scale.shape[0] > 1), int(self.v_scale.shape[0] > 1)

    @cached_property
    def largest(self) -> float:
        """What 8-bit storage saturates at; 0 for wider types."""
        return torch.finfo(self.k.dtype).max if self.k.dtype.itemsize == 1 else 0.0

    @cached_property
    def wide(self) -> bool:
        """Element offsets pass 2^31."""
        return max(self.k.numel(), self.v.numel()) >= 1 << 31

    @staticmethod
    def of(
        k: torch.Tensor, v: torch.Tensor, layout: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
        scaled: bool, slot_map: torch.Tensor | None = None, run: int = 0,
    ) -> Cache:  # fmt: skip
        """From `[pages, P, Hkv, D]` (NHD) or `[pages, Hkv, P, D]` (HND)."""
        row, head = (1, 2) if layout == "NHD" else (2, 1)
        return Cache(
            k, v,
            (k.stride(0), k.stride(row), k.stride(head)), (v.stride(0), v.stride(row), v.stride(head)),
            k.shape[row], k_scale, v_scale, scaled, slot_map, run,
        )  # fmt: skip


@hashed_once
@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer."""

    num_q: int
    num_kv: int
    dim: int
    v_dim: int

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q // self.num_kv

    @cached_property
    def block(self) -> int:
        """Query heads of a KV head in one decode program; `tl.dot` takes 16 rows at least."""
        return max(16, min(64, power_of_two(self.group)))


@dataclass(frozen=True, eq=False)
class Variant:
    """What a layer asks for beyond plain attention."""

    scale: float
    cap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True


def _sub_page(cache: Cache, block_n: int) -> int:
    """Consecutive tokens one table entry serves: the largest power of two in the run, at most a tile."""
    run = cache.run or cache.page
    return min(run & -run, block_n)


def _upcast(dtype: torch.dtype) -> bool:
    """The interpreter's `tl.dot` is wrong for bf16 (silently): it computes in float32 there."""
    return interpreting() and dtype is torch.bfloat16


def decode_programs(heads: Heads) -> int:
    """Programs per request, without splits."""
    return heads.num_kv * -(-heads.group // heads.block)


def partials(
    rows: int, heads: Heads, config: Decode, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Split-KV workspace `([rows, Hq, S, Dv], [rows, Hq, S])` in float32, or None without splits."""
    if config.num_splits == 1:
        return None
    shape = (rows, heads.num_q, config.num_splits)
    return (
        torch.empty(*shape, heads.v_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _decode_constexprs(
    cache: Cache, heads: Heads, variant: Variant, config: Decode, split: bool, write_lse: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    return {
        "PAGE": cache.page, "SUB": _sub_page(cache, config.block_n), "GROUP": heads.group,
        "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_H": heads.block, "BLOCK_N": config.block_n,
        "HAS_CAP": variant.cap is not None, "HAS_WINDOW": variant.window is not None,
        "HAS_SINKS": variant.sinks is not None, "WRITE_LSE": write_lse, "SPLIT": split,
        "UPCAST": _upcast(dtype), "FLAT": cache.flat, "WIDE": cache.wide,
    }  # fmt: skip


def _merge_constexprs(heads: Heads, splits: int, has_sinks: bool, write_lse: bool) -> dict[str, Any]:
    return {
        "DV": heads.v_dim, "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_S": min(16, power_of_two(splits)), "HAS_SINKS": has_sinks, "WRITE_LSE": write_lse,
    }  # fmt: skip


def decode(
    q: torch.Tensor,
    cache: Cache,
    source: torch.Tensor,
    req_rows: torch.Tensor,
    kv_start: torch.Tensor,
    kv_lens: torch.Tensor,
    heads: Heads,
    variant: Variant,
    config: Decode,
    workspace: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`q [B, Hq, D]` against each request's table -> `out [B, Hq, Dv]`, `lse [B, Hq]` natural log."""
    split = workspace is not None
    part_out, part_lse = workspace if workspace is not None else (out, kv_lens)
    has_sinks, write_lse = variant.sinks is not None, lse is not None
    sinks = out if variant.sinks is None else variant.sinks
    lse_arg = kv_lens if lse is None else lse
    splits = config.num_splits if split else 1
    grid = (q.shape[0] * decode_programs(heads) * splits,)
    args = (
        q, cache.k, cache.v, source, cache.slot_map, req_rows, kv_start, kv_lens,
        cache.k_scale, cache.v_scale, sinks, out, lse_arg, part_out, part_lse,
        q.stride(0), q.stride(1), *cache.k_strides, *cache.v_strides, source.stride(0),
        out.stride(0), out.stride(1), lse_arg.stride(0),
        *cache.scale_strides,
        variant.scale, variant.cap or 0.0, variant.window or 0, splits, 2 if splits > 1 else 1, heads.num_kv,
    )  # fmt: skip
    key = (heads, config, split, write_lse, q.dtype)
    made = cache.memo.get(key)
    if made is None:
        made = cache.memo[key] = (
            _decode_constexprs(cache, heads, variant, config, split, write_lse, q.dtype),
            _merge_constexprs(heads, splits, has_sinks, write_lse),
        )
    constexprs, merge_constexprs = made
    launch(decode_kernel, grid, args, constexprs, num_warps=config.num_warps, num_stages=config.num_stages)
    if split:
        merge_args = (
            part_out, part_lse, sinks, out, lse_arg, out.stride(0), out.stride(1), lse_arg.stride(0),
            heads.num_q, splits,
        )  # fmt: skip
        launch(
            merge_kernel, (q.shape[0] * heads.num_q,), merge_args, merge_constexprs, num_warps=2, num_stages=2
        )


@dataclass(frozen=True, eq=False)
class ExtendStep:
    """The parts of a plan that extend reads; `pool_lens` None = nothing is read from the pool.

    `key_offsets int32 [B + 1]`: rows of k and v per request, where they aren't `query_offsets`.
    """

    source: torch.Tensor | None
    req_rows: torch.Tensor
    query_offsets: torch.Tensor
    prefix_lens: torch.Tensor
    pool_lens: torch.Tensor | None
    kv_start: torch.Tensor | None
    positions: torch.Tensor | None = None
    mask_cells: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None


def extend(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: Cache,
    step: ExtendStep,
    heads: Heads,
    variant: Variant,
    config: Extend,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    pack: int | None = None,
    anchor: bool = False,
) -> None:
    """`q [T, Hq, D]` of ragged requests -> `out [T, Hq, Dv]`, `lse [T, Hq]` natural log.

    With `k`, `v` this step's own tokens are read from them and `step.pool_lens` counts the cached ones;
    without, everything is in the pool. `pack` query heads of a KV head share a program (default: all).
    `anchor`: tiles begin at absolute positions (batch invariance).
    """
    if pack is None:
        pack = heads.group if heads.group <= config.block_m else 1
    tokens = config.block_m // pack
    num_blocks = q.shape[0] // tokens + step.req_rows.shape[0]
    num_heads = heads.num_q // pack
    unused = step.query_offsets
    direct = k is not None
    k_arg, v_arg = (k, v) if k is not None and v is not None else (q, q)
    sinks = out if variant.sinks is None else variant.sinks
    lse_arg = unused if lse is None else lse
    source = unused[None] if step.source is None else step.source
    cells = unused if step.mask_cells is None else step.mask_cells
    if cells.dtype is torch.bool:
        cells = cells.view(torch.uint8)
    args = (
        q, k_arg, v_arg, cache.k, cache.v, source, cache.slot_map, step.req_rows, step.query_offsets,
        step.query_offsets if step.key_offsets is None else step.key_offsets, step.prefix_lens,
        unused if step.pool_lens is None else step.pool_lens,
        unused if step.kv_start is None else step.kv_start,
        unused if step.positions is None else step.positions,
        cells, unused if step.mask_indptr is None else step.mask_indptr,
        cache.k_scale, cache.v_scale, sinks, out, lse_arg,
        q.stride(0), q.stride(1), k_arg.stride(0), k_arg.stride(1), v_arg.stride(0), v_arg.stride(1),
        *cache.k_strides, *cache.v_strides, source.stride(0),
        out.stride(0), out.stride(1), lse_arg.stride(0),
        *cache.scale_strides,
        variant.scale, variant.cap or 0.0, variant.window or 0,
        step.req_rows.shape[0], num_blocks, num_heads,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "SUB": _sub_page(cache, config.block_n), "GROUP": heads.group, "PACK": pack,
        "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "POOL": step.pool_lens is not None, "DIRECT": direct, "CAUSAL": variant.causal,
        "HAS_MASK": step.mask_cells is not None, "HAS_POSITIONS": step.positions is not None,
        "HAS_WINDOW": variant.window is not None, "HAS_CAP": variant.cap is not None,
        "HAS_SINKS": variant.sinks is not None, "WRITE_LSE": lse is not None, "UPCAST": _upcast(q.dtype),
        "FLAT": cache.flat, "WIDE": cache.wide, "ALIKE": cache.k_strides == cache.v_strides,
        "ANCHOR": anchor and variant.window is not None,
    }  # fmt: skip
    options = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
    launch(
        extend_kernel, (num_blocks * num_heads,), args, constexprs,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip


def kv_write(k: torch.Tensor, v: torch.Tensor, cache: Cache, loc: torch.Tensor) -> None:
    """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at slots `loc int64 [T]`: scaled once, saturated."""
    tokens, num_kv, dim = k.shape
    if tokens == 0:
        return
    v_dim = v.shape[2]
    args = (
        k, v, cache.k, cache.v, loc, cache.k_scale, cache.v_scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *cache.k_strides, *cache.v_strides,
        *cache.scale_strides, cache.largest,
    )  # fmt: skip
    key = (num_kv, dim, v_dim)
    constexprs = cache.memo.get(key)
    if constexprs is None:
        constexprs = cache.memo[key] = {
            "PAGE": cache.page, "HEADS": num_kv, "D": dim, "DV": v_dim,
            "BLOCK_K": power_of_two(num_kv * dim), "BLOCK_V": power_of_two(num_kv * v_dim),
            "SCALED": cache.scaled, "SATURATE": cache.k.dtype.itemsize == 1,
        }  # fmt: skip
    launch(kv_write_kernel, (tokens,), args, constexprs, num_warps=4, num_stages=1)
