"""Host side of decode: ranges once a step, then one launch a layer and, where requests are cut, a merge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from anyattn.kernels.triton.attention import Cache, Heads, Variant, decode_programs, pairs, sub_page, upcast
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.decode import decode_kernel
from anyattn.kernels.triton.launch import Fixed, Started, direct_device, launch
from anyattn.kernels.triton.merge import merge_ranges_kernel
from anyattn.kernels.triton.ranges import FIELDS, ranges_kernel

__all__ = [
    "RANGES_CONSTEXPRS",
    "DecodeStep",
    "decode",
    "fill_ranges",
    "pieces",
    "ranges_constants",
    "started_decode",
]

_FEW_B, _BLOCK_B = 64, 1024  # two kernels, not one for each size of a batch
RANGES_CONSTEXPRS = ("BLOCK_N", "SUB", "HAS_WINDOW", "MIN_TILES", "SPLIT", "OWN", "BLOCK_B", "PARTS")
"""What a kernel that deals a step out is compiled for, in its order; see `ranges_kernel`."""
_fills: dict[tuple[Any, ...], Started] = {}
_alike: dict[tuple[Any, ...], int] = {}

Pieces = tuple[torch.Tensor, torch.Tensor]
"""`([R + B, Hq, Dv], [R + B, Hq])` in float32."""


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """What the layers of a plan group share in one step.

    `source`: request table; `req_rows int64 [B]` into it; `kv_start`, `kv_lens int32 [B]`; `window` trims
    further; `run`: consecutive slots that a table entry stands for; `heads`: of the layer with most of them;
    `ranges int32 [R, FIELDS]`: filled by `fill_ranges`; `pieces`: workspace, None = no request is cut.
    """

    source: torch.Tensor
    req_rows: torch.Tensor
    kv_start: torch.Tensor
    kv_lens: torch.Tensor
    window: int | None
    run: int
    heads: Heads
    tiles: Decode
    ranges: torch.Tensor
    pieces: Pieces | None

    @cached_property
    def fixed(self) -> tuple[Fixed, Fixed]:
        """Arguments of decode and of its merge, the same for every layer."""
        return self.with_pieces(self.pieces)

    @cached_property
    def number(self) -> int:
        """Equal for steps that are dealt out alike, and whose arguments kernels are specialised on alike."""
        return _alike.setdefault((self.tiles, self.heads, self.fixed[0].key), len(_alike))

    def with_pieces(self, work: Pieces | None) -> tuple[Fixed, Fixed]:
        """The same with another workspace."""
        part_out, part_lse = (None, None) if work is None else work
        shared = (self.source, self.req_rows, self.kv_start, self.kv_lens, self.ranges, part_out, part_lse)
        return Fixed(*shared, self.source.stride(0)), Fixed(self.ranges, part_out, part_lse)

    @staticmethod
    def of(
        source: torch.Tensor, req_rows: torch.Tensor, kv_start: torch.Tensor, kv_lens: torch.Tensor,
        window: int | None, run: int, heads: Heads, tiles: Decode,
    ) -> DecodeStep:  # fmt: skip
        """With storage of its own."""
        ranges = torch.empty(tiles.num_ranges, FIELDS, dtype=torch.int32, device=source.device)
        work = pieces(req_rows.shape[0], heads, tiles, source.device)
        made = DecodeStep(source, req_rows, kv_start, kv_lens, window, run, heads, tiles, ranges, work)
        _ = made.fixed  # holds the tensors from the first on: who else does can be counted
        return made


def pieces(rows: int, heads: Heads, tiles: Decode, device: torch.device) -> Pieces | None:
    """Workspace for the parts of cut requests, or None where none is cut."""
    if not tiles.split:
        return None
    shape = (rows + tiles.num_ranges, heads.num_q)
    return (
        torch.empty(*shape, heads.v_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def ranges_constants(step: DecodeStep) -> tuple[int, ...]:
    """Of `RANGES_CONSTEXPRS`, what deals the step out."""
    batch, tiles = step.req_rows.shape[0], step.tiles
    return (
        tiles.keys,
        sub_page(step.run, tiles.keys),
        step.window is not None,
        tiles.min_tiles * tiles.block_n // tiles.keys,
        tiles.split,
        tiles.split and not tiles.parts and batch <= min(tiles.num_ranges, _BLOCK_B),
        _FEW_B if batch <= _FEW_B else _BLOCK_B,
        tiles.parts,
    )


def fill_ranges(step: DecodeStep) -> None:  # anyattn: in-graph
    """Deal the step out, on the device: one launch whose grid depends on the chip and the batch alone."""
    batch, tiles, device = step.req_rows.shape[0], step.tiles, direct_device()
    tensors = (step.req_rows, step.kv_start, step.kv_lens, step.ranges)
    numbers = (batch, tiles.num_ranges, step.window or 0)
    constants = ranges_constants(step)
    odd = 0
    if device >= 0:
        places = [tensor.data_ptr() for tensor in tensors]
        odd = (places[0] | places[1] | places[2] | places[3]) & 15
        started = _fills.get((device, odd, constants))
        if started is not None:
            started.start(torch._C._cuda_getCurrentRawStream(device), tiles.num_ranges, *places, *numbers)
            return
    constexprs = dict(zip(RANGES_CONSTEXPRS, constants, strict=True))
    compiled = launch(
        ranges_kernel, (tiles.num_ranges,), (*tensors, *numbers), constexprs,
        num_warps=1 if batch <= _FEW_B else 4, num_stages=1,
    )  # fmt: skip
    if compiled is not None and odd == 0:
        _fills[device, odd, constants] = Started(compiled, constants)


class _Layer:
    """What a layer's launches have in common in every step."""

    def __init__(
        self, cache: Cache, heads: Heads, variant: Variant, tiles: Decode, write_lse: bool, dtype: torch.dtype
    ) -> None:
        self.kind = (heads, tiles, write_lse, dtype)
        self.grid = tiles.num_ranges * decode_programs(heads)
        every = max(1, tiles.parts)
        self.merge_grid = tiles.num_ranges // every * heads.num_q
        block_dv, has_sinks = max(16, power_of_two(heads.v_dim)), variant.sinks is not None
        self.fixed = Fixed(
            cache.k, cache.v, cache.slot_map, cache.k_scale, cache.v_scale,
            *cache.k_strides, *cache.v_strides, *cache.scale_strides,
            variant.scale, variant.cap or 0.0, variant.window or 0, heads.num_kv,
        )  # fmt: skip
        self.constexprs = {
            "PAGE": cache.page, "SUB": sub_page(cache.run or cache.page, tiles.block_n),
            "GROUP": heads.group, "D": heads.dim, "DV": heads.v_dim,
            "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": block_dv,
            "BLOCK_H": heads.block, "BLOCK_N": tiles.block_n,
            "HAS_CAP": variant.cap is not None, "HAS_WINDOW": variant.window is not None,
            "HAS_SINKS": has_sinks, "WRITE_LSE": write_lse, "SPLIT": tiles.split,
            "UPCAST": upcast(dtype), "PAIRS": pairs(cache, heads, dtype) if tiles.half else 0,
            "FLAT": cache.flat, "WIDE": cache.wide, "UNIT": tiles.keys,
            "ALIKE": tiles.alike and cache.k_strides == cache.v_strides,
            "WALK": tiles.split and not tiles.parts, "OVERLAP": tiles.overlap,
        }  # fmt: skip
        self.merge_constexprs = {
            "DV": heads.v_dim, "BLOCK_DV": block_dv, "BLOCK_S": 16, "HAS_SINKS": has_sinks,
            "WRITE_LSE": write_lse, "OVERLAP": tiles.overlap > 0, "EVERY": every,
        }  # fmt: skip
        self.started: dict[tuple[Any, ...], tuple[Started, Started | None] | None] = {}
        self.options = {"launch_pdl": True} if tiles.overlap > 1 else {}
        self.merge_options = {"launch_pdl": True} if tiles.overlap > 0 else {}

    def serves(self, heads: Heads, tiles: Decode, write_lse: bool, dtype: torch.dtype) -> bool:
        """Certainly; it may serve others that are equal to its own."""
        mine = self.kind
        return heads is mine[0] and tiles is mine[1] and write_lse is mine[2] and dtype is mine[3]


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
    tiles, sinks = step.tiles, variant.sinks
    layer: _Layer | None = cache.memo.get("decode")
    if layer is None or not layer.serves(heads, tiles, lse is not None, q.dtype):
        layer = _layer(cache, heads, variant, tiles, lse is not None, q.dtype)
    own, merging = step.fixed if work is None else step.with_pieces(work)
    q_t, q_h, _ = q.stride()
    out_t, out_h, _ = out.stride()
    strides = (q_t, q_h, out_t, out_h, 0 if lse is None else lse.stride(0))
    device = direct_device()
    if device < 0:
        _launch(layer, step, heads, q, out, lse, sinks, strides, own, merging)
        return
    q_at, out_at = q.data_ptr(), out.data_ptr()
    lse_at = None if lse is None else lse.data_ptr()
    sinks_at = None if sinks is None else sinks.data_ptr()
    known = (
        strides,
        own.key,
        device,
        (q_at | out_at | (lse_at or 0) | (sinks_at or 0)) & 15,
        sinks is None or sinks.dtype,
    )
    started = layer.started.get(known)
    if started is None:
        started = _launch(layer, step, heads, q, out, lse, sinks, strides, own, merging)
        if known[3] == 0:  # of odd addresses, any may be the odd one
            layer.started[known] = started
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    decoding, merges = started
    decoding.start(stream, layer.grid, q_at, out_at, lse_at, sinks_at, *strides, *own.values)
    if merges is not None:
        merges.start(
            stream,
            layer.merge_grid,
            out_at,
            lse_at,
            sinks_at,
            out_t,
            out_h,
            strides[4],
            heads.num_q,
            *merging.values,
        )


def started_decode(
    cache: Cache, heads: Heads, step: DecodeStep, dtype: torch.dtype, strides: tuple[int, ...],
    sinks: torch.Tensor | None, device: int,
) -> tuple[int, Started, int, Started | None] | None:  # fmt: skip
    """How `decode` repeats what it launched without LSE for aligned tensors of these strides, if it has: the
    kernel on its grid, and the merge on its own.

    First arguments of the former are q, out, None and sinks as addresses, `strides` and `step.fixed[0]`; of
    the latter out, None, sinks, `strides[2:]`, the query heads and `step.fixed[1]`.
    """
    layer: _Layer | None = cache.memo.get((heads, step.tiles, False, dtype))
    if layer is None:
        return None
    known = (strides, step.fixed[0].key, device, 0, sinks is None or sinks.dtype)
    started = layer.started.get(known)
    return None if started is None else (layer.grid, started[0], layer.merge_grid, started[1])


def _layer(
    cache: Cache, heads: Heads, variant: Variant, tiles: Decode, write_lse: bool, dtype: torch.dtype
) -> _Layer:
    """The layer's launches of that kind, which are the first to be asked in the next call."""
    key = (heads, tiles, write_lse, dtype)
    layer = cache.memo.get(key)
    if layer is None:
        layer = cache.memo[key] = _Layer(cache, heads, variant, tiles, write_lse, dtype)
    cache.memo["decode"] = layer
    return layer


def _launch(
    layer: _Layer, step: DecodeStep, heads: Heads, q: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, sinks: torch.Tensor | None, strides: tuple[int, ...],
    own: Fixed, merging: Fixed,
) -> tuple[Started, Started | None] | None:  # fmt: skip
    """Both launches by the ordinary seam; on the direct path, how to repeat them."""
    tiles, merge = step.tiles, None
    compiled = launch(
        decode_kernel, (layer.grid,),
        (q, out, lse, sinks, *strides), layer.constexprs, (own, layer.fixed),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **layer.options,
    )  # fmt: skip
    if tiles.split:
        merge = launch(
            merge_ranges_kernel, (layer.merge_grid,),
            (out, lse, sinks, *strides[2:], heads.num_q),
            layer.merge_constexprs, (merging,), num_warps=2, num_stages=2, **layer.merge_options,
        )  # fmt: skip
    if compiled is None:
        return None
    last = (*layer.fixed.values, *layer.constexprs.values())
    merging_last = tuple(layer.merge_constexprs.values())
    return Started(compiled, last), None if merge is None else Started(merge, merging_last)
