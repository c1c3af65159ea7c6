"""Host side of extend: which of its kernels a step gets, found once for steps of a kind, and its launch."""

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
from anyattn.kernels.triton.descriptors import Matrices, key_boxes, new_matrices, pool_matrices
from anyattn.kernels.triton.extend import extend_kernel
from anyattn.kernels.triton.extend_repeats import Arguments, Way
from anyattn.kernels.triton.extend_tma import extend_tma_kernel

__all__ = ["GLUON_VERSIONS", "ExtendStep", "extend"]

GLUON_VERSIONS = ("3.6.", "3.7.")
"""Triton versions that the kernel in Gluon was compiled with: the language is experimental."""

HOPPER_DIMS = (64, 128, 256)
MIN_BOX = 16
"""Rows of the smallest box: a page of 16. Smaller ones would need a copy for every few rows."""
MIN_ROWS = 48
"""Rows of whole tokens in a warpgroup's 64: groups with fewer, which are rare, weren't tried here."""


@dataclass(slots=True, eq=False)  # made in every call: frozen, it would take 2.7 times as long
class ExtendStep:
    """The parts of a plan that extend reads; `pool_lens` None = nothing is read from the pool.

    `key_offsets int32 [B + 1]`: rows of k and v per request, where they aren't `query_offsets`. `few`:
    requests of up to so many new tokens are another kernel's.
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
    few: int = 0


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
    if k is None or v is None:
        k = v = new = None
    else:
        new = (k.stride(), v.stride(), k.dtype, v.dtype, (k.data_ptr() | v.data_ptr()) & 15)
    source, cells = step.source, step.mask_cells
    kind = (
        config, heads, variant, anchor, new, q.stride(), q.dtype, q.data_ptr() & 15, q.shape[0] > 0,
        out.stride(), out.dtype, None if lse is None else lse.stride(),
        None if source is None else source.stride(), step.req_rows.dtype, step.pool_lens is None,
        None if step.positions is None else step.positions.dtype,
        None if cells is None else cells.dtype, step.key_offsets is None,
    )  # fmt: skip
    way: Way | None = cache.memo.get(kind)
    if way is None:
        way = cache.memo[kind] = _way(_Call(q, k, v, cache, step, heads, variant, config, out, lse, anchor))
    # What a step hasn't got is never read: any address will do.
    offsets = step.query_offsets
    way.start(
        q, k, v,
        (
            offsets if source is None else source, step.req_rows, offsets, step.prefix_lens,
            offsets if step.kv_start is None else step.kv_start,
            out if variant.sinks is None else variant.sinks, out, offsets if lse is None else lse,
        ),
        () if not way.reads_more else (
            offsets if step.key_offsets is None else step.key_offsets,
            offsets if step.pool_lens is None else step.pool_lens,
            offsets if step.positions is None else step.positions,
            offsets if cells is None else cells.view(torch.uint8) if cells.dtype is torch.bool else cells,
            offsets if step.mask_indptr is None else step.mask_indptr,
        ),
        step.few,
    )  # fmt: skip


@dataclass(eq=False)
class _Call:
    """What `extend` was called with, for the first time."""

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
    anchor: bool

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Arguments that end every kernel's."""
        variant, out, source = self.variant, self.out, self.step.source
        return (
            0 if source is None else source.stride(0), out.stride(0), out.stride(1),
            0 if self.lse is None else self.lse.stride(0), *self.cache.scale_strides,
            variant.scale, variant.cap or 0.0, variant.window or 0,
        )  # fmt: skip

    def packed(self, block_m: int) -> tuple[int, int, int]:
        """`(packed query heads, tokens of a row block, programs of one)` of `block_m` query rows."""
        pack = self.heads.group if self.heads.group <= block_m else 1
        return pack, block_m // pack, self.heads.num_q // pack

    def features(self) -> dict[str, bool]:
        """Constexprs that every kernel has."""
        variant = self.variant
        return {
            "HAS_CAP": variant.cap is not None, "HAS_SINKS": variant.sinks is not None,
            "WRITE_LSE": self.lse is not None,
        }  # fmt: skip


def _way(call: _Call) -> Way:
    """The first kernel of the configuration that can read the keys of such steps."""
    found = None
    if not call.anchor and _plain(call):
        if call.config.hopper is not None:
            found = _by_hand(call, call.config.hopper)
        if found is None and call.config.tma is not None:
            found = _by_descriptors(call, call.config.tma)
    return found or _by_pointers(call)


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


def _by_pointers(call: _Call) -> Way:
    q, cache, step, heads, variant, config = (
        call.q, call.cache, call.step, call.heads, call.variant, call.config,
    )  # fmt: skip
    pack, tokens, programs = call.packed(config.block_m)
    k, v = (q, q) if call.k is None or call.v is None else (call.k, call.v)
    rest = (
        cache.k, cache.v, cache.slot_map, cache.k_scale, cache.v_scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *cache.k_strides, *cache.v_strides, *call.numbers, programs,
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
        "ANCHOR": call.anchor and variant.window is not None,
    }  # fmt: skip
    return Way(extend_kernel, config, _as_they_are, rest, constexprs, tokens, programs, reads_more=True)


def _as_they_are(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> Arguments:
    return (q, q, q) if k is None else (q, k, v)


def _by_descriptors(call: _Call, config: Extend) -> Way | None:
    """None: these keys can't be read so."""
    kv = _matrices(call, config.block_n)
    if kv is None:
        return None
    cache, heads = call.cache, call.heads
    pack, tokens, programs = call.packed(config.block_m)
    box = partial(key_boxes, rows=config.block_n)
    pool = kv.described(config.block_n, box) if kv.paged else None

    def arguments(q: torch.Tensor, k: Any, v: Any) -> Arguments:
        return (q, *(pool or _new_boxes(k, v, box)))

    rest = (
        cache.slot_map if kv.paged else None, cache.k_scale, cache.v_scale,
        call.q.stride(0), call.q.stride(1), kv.k_head, kv.v_head, kv.page_rows, kv.head_rows, *call.numbers,
        programs,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "GROUP": heads.group, "PACK": pack, "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PAGED": kv.paged,
        "HAS_WINDOW": call.variant.window is not None, **call.features(),
    }  # fmt: skip
    return Way(extend_tma_kernel, config, arguments, rest, constexprs, tokens, programs)


def _new_boxes(k: torch.Tensor, v: torch.Tensor, box: Any) -> tuple[Any, Any]:
    kv = new_matrices(k, v)
    assert kv is not None, "their strides and alignment are those of the first time"
    return box(kv.k), box(kv.v)


@remembered
def _hopper() -> tuple[Any, Any] | None:
    """The kernel in Gluon and the module of its boxes, or None where this Triton's Gluon isn't known."""
    if not triton.__version__.startswith(GLUON_VERSIONS):
        return None
    from anyattn.kernels.triton import extend_hopper, extend_hopper_boxes

    return extend_hopper.extend_hopper_kernel, extend_hopper_boxes


def _by_hand(call: _Call, config: Extend) -> Way | None:
    """None: another kernel's step."""
    heads, hopper = call.heads, _hopper()
    pack = heads.group
    if (
        hopper is None
        or heads.dim != heads.v_dim
        or heads.dim not in HOPPER_DIMS
        or call.q.dtype.itemsize != 2
        or 64 // pack * pack < MIN_ROWS
    ):
        return None
    run = call.cache.run or call.cache.page
    rows = config.block_n if call.k is not None else min(run & -run, config.block_n)
    kv = None if rows < MIN_BOX else _matrices(call, rows)
    kernel, its = hopper
    if kv is None or its.query_boxes(call.q, pack) is None:
        return None
    cache, variant = call.cache, call.variant
    box = partial(its.key_boxes, rows=rows)
    pool = kv.described(("gluon", rows), box) if kv.paged else None

    def arguments(q: torch.Tensor, k: Any, v: Any) -> Arguments:
        return (its.query_boxes(q, pack), *(pool or _new_boxes(k, v, box)))

    programs = heads.num_q // pack
    rest = (
        cache.slot_map if kv.paged else None, cache.k_scale, cache.v_scale,
        call.q.stride(0), call.q.stride(1), kv.k_head, kv.v_head, kv.page_rows, kv.head_rows, its.OUTSIDE,
        *call.numbers, programs,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "GROUP": heads.group, "PACK": pack, "D": heads.dim, "BLOCK_N": config.block_n,
        "BOX": rows, "STAGES": config.num_stages, "SETS": 1 if heads.dim > 128 else 2, "PAGED": kv.paged,
        "HAS_WINDOW": variant.window is not None, **call.features(),
    }  # fmt: skip
    return Way(kernel, config, arguments, rest, constexprs, 128 // pack, programs, num_units(call.q.device))
