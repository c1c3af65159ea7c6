"""Host side of extend: which of its kernels a step gets, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from typing import Any

import torch
import triton

from anyattn.kernels.triton.attention import Cache, Heads, Variant, sub_page, upcast
from anyattn.kernels.triton.configs import Extend
from anyattn.kernels.triton.configs.choose import num_units, power_of_two
from anyattn.kernels.triton.descriptors import Matrices, boxes, new_matrices, pool_matrices
from anyattn.kernels.triton.extend import extend_kernel
from anyattn.kernels.triton.extend_tma import extend_tma_kernel
from anyattn.kernels.triton.launch import launch

__all__ = ["GLUON_VERSIONS", "ExtendStep", "extend"]

GLUON_VERSIONS = ("3.6.", "3.7.")
"""Triton versions that the kernel in Gluon was compiled with: the language is experimental."""

HOPPER_DIMS = (64, 128, 256)
MIN_BOX = 16
"""Rows of the smallest box: a page of 16. Smaller ones would need a copy for every few rows."""
MIN_ROWS = 48
"""Rows with queries, of a warpgroup's 64: below, other kernels are no slower."""


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
    anchor: bool = False,
) -> None:
    """`q [T, Hq, D]` of ragged requests -> `out [T, Hq, Dv]`, `lse [T, Hq]` natural log.

    With `k`, `v` this step's own tokens are read from them and `step.pool_lens` counts the cached ones;
    without, everything is in the pool. `anchor`: tiles begin at absolute positions (batch invariance).
    """
    call = _Call(q, k, v, cache, step, heads, variant, config, out, lse)
    if not anchor and _plain(call):
        if config.hopper is not None and _by_hand(call):
            return
        if config.tma is not None and _by_descriptors(call):
            return
    _by_pointers(call, anchor)


@dataclass(eq=False)
class _Call:
    """What `extend` was called with, and its optional tensors as kernels take them."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache: Cache
    step: ExtendStep
    heads: Heads
    variant: Variant
    config: Extend
    out: torch.Tensor
    lse: torch.Tensor | None

    def __post_init__(self) -> None:
        unused = self.step.query_offsets
        self.sinks = self.out if self.variant.sinks is None else self.variant.sinks
        self.lse_arg = unused if self.lse is None else self.lse
        self.source = unused[None] if self.step.source is None else self.step.source

    def blocks(self, block_m: int) -> tuple[int, int, int]:
        """`(packed query heads, row blocks, programs of a row block)` of `block_m` query rows."""
        pack = self.heads.group if self.heads.group <= block_m else 1
        num_blocks = self.q.shape[0] // (block_m // pack) + self.step.req_rows.shape[0]
        return pack, num_blocks, self.heads.num_q // pack

    def features(self) -> dict[str, bool]:
        """Constexprs that every kernel has."""
        variant = self.variant
        return {
            "HAS_CAP": variant.cap is not None, "HAS_SINKS": variant.sinks is not None,
            "WRITE_LSE": self.lse is not None,
        }  # fmt: skip


def _plain(call: _Call) -> bool:
    """What kernels with descriptors compute: causal, windows by index, head sizes of whole boxes."""
    step, variant = call.step, call.variant
    return (
        variant.causal
        and step.mask_cells is None
        and step.key_offsets is None
        and (variant.window is None or step.positions is None)
        and all(n == power_of_two(n) >= 16 for n in (call.heads.dim, call.heads.v_dim))
        and not upcast(call.q.dtype)
    )


def _matrices(call: _Call, block_n: int) -> Matrices | None:
    """All keys of a step as matrices whose boxes have `block_n` rows. None: they are read through pointers,
    because they come from two places, runs of slots are shorter than that, types differ or strides forbid it.
    """
    cache, dtype = call.cache, call.q.dtype
    if call.k is not None and call.v is not None:
        alone = call.step.pool_lens is None and call.k.dtype == call.v.dtype == dtype
        return new_matrices(call.k, call.v) if alone else None
    run = cache.run or cache.page
    if run % block_n or cache.page % block_n or not cache.k.dtype == cache.v.dtype == dtype:
        return None
    if "matrices" not in cache.memo:
        cache.memo["matrices"] = pool_matrices(cache)
    found: Matrices | None = cache.memo["matrices"]
    return found


def _start(kernel: Any, grid: int, args: Any, constexprs: dict[str, Any], config: Extend) -> None:
    options = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
    launch(
        kernel, (grid,), args, constexprs,
        num_warps=config.num_warps, num_stages=config.num_stages, **options,
    )  # fmt: skip


def _by_pointers(call: _Call, anchor: bool) -> None:
    q, cache, step, heads, variant, config = (
        call.q, call.cache, call.step, call.heads, call.variant, call.config,
    )  # fmt: skip
    pack, num_blocks, num_heads = call.blocks(config.block_m)
    unused, source = step.query_offsets, call.source
    k_arg, v_arg = (call.k, call.v) if call.k is not None and call.v is not None else (q, q)
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
        cache.k_scale, cache.v_scale, call.sinks, call.out, call.lse_arg,
        q.stride(0), q.stride(1), k_arg.stride(0), k_arg.stride(1), v_arg.stride(0), v_arg.stride(1),
        *cache.k_strides, *cache.v_strides, source.stride(0),
        call.out.stride(0), call.out.stride(1), call.lse_arg.stride(0), *cache.scale_strides,
        variant.scale, variant.cap or 0.0, variant.window or 0,
        step.req_rows.shape[0], num_blocks, num_heads,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "SUB": sub_page(cache.run or cache.page, config.block_n),
        "GROUP": heads.group, "PACK": pack, "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "POOL": step.pool_lens is not None, "DIRECT": call.k is not None, "CAUSAL": variant.causal,
        "HAS_MASK": step.mask_cells is not None, "HAS_POSITIONS": step.positions is not None,
        "HAS_WINDOW": variant.window is not None, **call.features(), "UPCAST": upcast(q.dtype),
        "FLAT": cache.flat, "WIDE": cache.wide, "ALIKE": cache.k_strides == cache.v_strides,
        "ANCHOR": anchor and variant.window is not None,
    }  # fmt: skip
    _start(extend_kernel, num_blocks * num_heads, args, constexprs, config)


def _by_descriptors(call: _Call) -> bool:
    """False: these keys can't be read so."""
    config = call.config.tma
    assert config is not None
    kv = _matrices(call, config.block_n)
    if kv is None:
        return False
    q, cache, step, heads, variant, out = (
        call.q, call.cache, call.step, call.heads, call.variant, call.out,
    )  # fmt: skip
    pack, num_blocks, num_heads = call.blocks(config.block_m)
    k, v = boxes(kv, config.block_n)
    args = (
        q, k, v, call.source, cache.slot_map if kv.paged else None, step.req_rows, step.query_offsets,
        step.prefix_lens, step.query_offsets if step.kv_start is None else step.kv_start,
        cache.k_scale, cache.v_scale, call.sinks, out, call.lse_arg,
        q.stride(0), q.stride(1), kv.k_head, kv.v_head, kv.page_rows, kv.head_rows, call.source.stride(0),
        out.stride(0), out.stride(1), call.lse_arg.stride(0), *cache.scale_strides,
        variant.scale, variant.cap or 0.0, variant.window or 0,
        step.req_rows.shape[0], num_blocks, num_heads,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "GROUP": heads.group, "PACK": pack, "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PAGED": kv.paged,
        "HAS_WINDOW": variant.window is not None, **call.features(),
    }  # fmt: skip
    _start(extend_tma_kernel, num_blocks * num_heads, args, constexprs, config)
    return True


@remembered
def _hopper() -> tuple[Any, Any] | None:
    """The kernel in Gluon and the module of its boxes, or None where this Triton's Gluon isn't known."""
    if not triton.__version__.startswith(GLUON_VERSIONS):
        return None
    from anyattn.kernels.triton import extend_hopper, extend_hopper_boxes

    return extend_hopper.extend_hopper_kernel, extend_hopper_boxes


def _by_hand(call: _Call) -> bool:
    """False: another kernel's step."""
    config, heads, hopper = call.config.hopper, call.heads, _hopper()
    assert config is not None
    pack = heads.group
    if (
        hopper is None
        or heads.dim != heads.v_dim
        or heads.dim not in HOPPER_DIMS
        or call.q.dtype.itemsize != 2
        or 64 // pack * pack < MIN_ROWS
    ):
        return False
    run = call.cache.run or call.cache.page
    box = config.block_n if call.k is not None else min(run & -run, config.block_n)
    kv = None if box < MIN_BOX else _matrices(call, box)
    if kv is None:
        return False
    cache, step, variant, out = call.cache, call.step, call.variant, call.out
    kernel, its = hopper
    q = its.query_boxes(call.q, pack)
    if q is None:
        return False
    num_heads = heads.num_q // pack
    items = (call.q.shape[0] // (64 // pack * 2) + step.req_rows.shape[0]) * num_heads
    k, v = kv.described(("gluon", box), partial(its.key_boxes, rows=box))
    args = (
        q, k, v, call.source, cache.slot_map if kv.paged else None, step.req_rows, step.query_offsets,
        step.prefix_lens, step.query_offsets if step.kv_start is None else step.kv_start,
        cache.k_scale, cache.v_scale, call.sinks, out, call.lse_arg,
        call.q.stride(0), call.q.stride(1), kv.k_head, kv.v_head, kv.page_rows, kv.head_rows, its.OUTSIDE,
        call.source.stride(0), out.stride(0), out.stride(1), call.lse_arg.stride(0), *cache.scale_strides,
        variant.scale, variant.cap or 0.0, variant.window or 0, step.req_rows.shape[0], num_heads,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "GROUP": heads.group, "PACK": pack, "D": heads.dim, "BLOCK_N": config.block_n,
        "BOX": box, "STAGES": config.num_stages, "SETS": 1 if heads.dim > 128 else 2, "PAGED": kv.paged,
        "HAS_WINDOW": variant.window is not None, **call.features(),
    }  # fmt: skip
    _start(kernel, min(items, num_units(call.q.device)), args, constexprs, config)
    return True
