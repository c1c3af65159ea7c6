"""Host side of decode: ranges once a step, then one launch a layer and, where requests are cut, a merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyattn.kernels.triton.attention import Cache, Heads, Variant, decode_programs, sub_page, upcast
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.decode import decode_kernel
from anyattn.kernels.triton.launch import launch
from anyattn.kernels.triton.merge import merge_ranges_kernel
from anyattn.kernels.triton.ranges import FIELDS, ranges_kernel

__all__ = ["DecodeStep", "decode", "fill_ranges", "pieces"]

_BLOCK_B = 1024

Pieces = tuple[torch.Tensor, torch.Tensor]
"""`([R + B, Hq, Dv], [R + B, Hq])` in float32."""


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """What the layers of a plan group share in one step.

    `source`: request table; `req_rows int64 [B]` into it; `kv_start`, `kv_lens int32 [B]`; `window` trims
    further; `run`: consecutive slots that a table entry stands for; `ranges int32 [R, FIELDS]`: filled by
    `fill_ranges`; `pieces`: workspace, None = no request is cut.
    """

    source: torch.Tensor
    req_rows: torch.Tensor
    kv_start: torch.Tensor
    kv_lens: torch.Tensor
    window: int | None
    run: int
    tiles: Decode
    ranges: torch.Tensor
    pieces: Pieces | None

    @staticmethod
    def of(
        source: torch.Tensor, req_rows: torch.Tensor, kv_start: torch.Tensor, kv_lens: torch.Tensor,
        window: int | None, run: int, heads: Heads, tiles: Decode,
    ) -> DecodeStep:  # fmt: skip
        """With storage of its own."""
        ranges = torch.empty(tiles.num_ranges, FIELDS, dtype=torch.int32, device=source.device)
        work = pieces(req_rows.shape[0], heads, tiles, source.device)
        return DecodeStep(source, req_rows, kv_start, kv_lens, window, run, tiles, ranges, work)


def pieces(rows: int, heads: Heads, tiles: Decode, device: torch.device) -> Pieces | None:
    """Workspace for the parts of cut requests, or None where none is cut."""
    if not tiles.split:
        return None
    shape = (rows + tiles.num_ranges, heads.num_q)
    return (
        torch.empty(*shape, heads.v_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def fill_ranges(step: DecodeStep) -> None:  # anyattn: in-graph
    """Deal the step out, on the device: one launch whose grid depends on the chip and the batch alone."""
    batch, tiles = step.req_rows.shape[0], step.tiles
    args = (
        step.req_rows, step.kv_start, step.kv_lens, step.ranges, batch, tiles.num_ranges, step.window or 0,
    )  # fmt: skip
    constexprs = {
        "BLOCK_N": tiles.block_n, "SUB": sub_page(step.run, tiles.block_n),
        "HAS_WINDOW": step.window is not None, "MIN_TILES": tiles.min_tiles, "SPLIT": tiles.split,
        "OWN": tiles.split and batch <= min(tiles.num_ranges, _BLOCK_B),
        "BLOCK_B": min(_BLOCK_B, max(16, power_of_two(batch))),
    }  # fmt: skip
    launch(ranges_kernel, (tiles.num_ranges,), args, constexprs, num_warps=1, num_stages=1)


def _decode_constexprs(
    cache: Cache, heads: Heads, variant: Variant, tiles: Decode, write_lse: bool, dtype: torch.dtype
) -> dict[str, Any]:
    return {
        "PAGE": cache.page, "SUB": sub_page(cache.run or cache.page, tiles.block_n), "GROUP": heads.group,
        "D": heads.dim, "DV": heads.v_dim,
        "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_H": heads.block, "BLOCK_N": tiles.block_n,
        "HAS_CAP": variant.cap is not None, "HAS_WINDOW": variant.window is not None,
        "HAS_SINKS": variant.sinks is not None, "WRITE_LSE": write_lse, "SPLIT": tiles.split,
        "UPCAST": upcast(dtype), "FLAT": cache.flat, "WIDE": cache.wide, "OVERLAP": tiles.overlap > 1,
    }  # fmt: skip


def _merge_constexprs(heads: Heads, tiles: Decode, has_sinks: bool, write_lse: bool) -> dict[str, Any]:
    return {
        "DV": heads.v_dim, "BLOCK_DV": max(16, power_of_two(heads.v_dim)),
        "BLOCK_S": min(16, power_of_two(tiles.num_ranges)), "HAS_SINKS": has_sinks, "WRITE_LSE": write_lse,
        "OVERLAP": tiles.overlap > 0,
    }  # fmt: skip


def decode(
    q: torch.Tensor,
    cache: Cache,
    step: DecodeStep,
    heads: Heads,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: Pieces | None = None,
) -> None:
    """`q [B, Hq, D]` against each request's keys -> `out [B, Hq, Dv]`, `lse [B, Hq]` natural log.

    `work`: workspace in place of the step's, for layers with other heads.
    """
    tiles, work = step.tiles, step.pieces if work is None else work
    part_out, part_lse = (out, step.kv_lens) if work is None else work
    has_sinks, write_lse = variant.sinks is not None, lse is not None
    sinks = out if variant.sinks is None else variant.sinks
    lse_arg = step.kv_lens if lse is None else lse
    args = (
        q, cache.k, cache.v, step.source, cache.slot_map, step.req_rows, step.kv_start, step.kv_lens,
        step.ranges, cache.k_scale, cache.v_scale, sinks, out, lse_arg, part_out, part_lse,
        q.stride(0), q.stride(1), *cache.k_strides, *cache.v_strides, step.source.stride(0),
        out.stride(0), out.stride(1), lse_arg.stride(0),
        *cache.scale_strides, variant.scale, variant.cap or 0.0, variant.window or 0, heads.num_kv,
    )  # fmt: skip
    key = (heads, tiles, write_lse, q.dtype)
    made = cache.memo.get(key)
    if made is None:
        made = cache.memo[key] = (
            _decode_constexprs(cache, heads, variant, tiles, write_lse, q.dtype),
            _merge_constexprs(heads, tiles, has_sinks, write_lse),
            {"launch_pdl": True} if tiles.overlap > 1 else {},
            {"launch_pdl": True} if tiles.overlap > 0 else {},
        )
    constexprs, merge_constexprs, options, merge_options = made
    launch(
        decode_kernel, (tiles.num_ranges * decode_programs(heads),), args, constexprs,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options,
    )  # fmt: skip
    if tiles.split:
        merge_args = (
            step.ranges, part_out, part_lse, sinks, out, lse_arg, out.stride(0), out.stride(1),
            lse_arg.stride(0), heads.num_q,
        )  # fmt: skip
        launch(
            merge_ranges_kernel, (tiles.num_ranges * heads.num_q,), merge_args, merge_constexprs,
            num_warps=2, num_stages=2, **merge_options,
        )  # fmt: skip
