"""Host side of verify: steps of a few query tokens a request, whose keys are cut as decode cuts them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from anyattn.kernels.triton.attention import Cache, Heads, Variant, sub_page, upcast
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.configs.choose_verify import Verify
from anyattn.kernels.triton.decode_launch import DecodeStep, Pieces, fill_ranges
from anyattn.kernels.triton.launch import Fixed, Started, direct_device, launch
from anyattn.kernels.triton.ranges import FIELDS, few_keys_kernel
from anyattn.kernels.triton.verify import ALL_COLUMNS, DRAFTS, NO_MASK, merge_verify_kernel, verify_kernel

__all__ = ["ALL_COLUMNS", "DRAFTS", "NO_MASK", "VerifyMasks", "VerifyStep", "fill_verify", "verify"]

_FEW_BLOCK = 256
_MERGED_ELEMENTS = 128
"""Of the output, in a program that merges: rows wait for each other. On an H200, 1 x 8k + 4 took 18.7
us so, 19.3 with 256, 20.6 with 512; 1 x 8k + 16 20.4, 20.5, 21.1 and 22.4 with 1024. 16 pieces at once.
"""


@dataclass(frozen=True, eq=False)
class VerifyMasks:
    """Visibility beyond the causal rule.

    `kind`: `NO_MASK`, `ALL_COLUMNS` or `DRAFTS`; `cells`, `indptr`: as `Plan.mask_cells` and `mask_indptr`,
    whose rows have every column in both forms. `positions int64 [T]`: the caller's own, for windows.
    """

    kind: int = NO_MASK
    cells: torch.Tensor | None = None
    indptr: torch.Tensor | None = None
    positions: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """What the layers of a plan group share in one step: ranges (`dealt`), workspace, and where rows are.

    `query_offsets int32 [B + 1]`, `prefix_lens int32 [B]`; requests of more than `tiles.max_new` tokens are
    skipped. `listed int32 [B]`: keys of all requests, where such are expected: `dealt.kv_lens` is then made
    from it and counts none of theirs; None: there are none, and `dealt.kv_lens` is the table's.
    """

    dealt: DecodeStep
    tiles: Verify
    query_offsets: torch.Tensor
    prefix_lens: torch.Tensor
    masks: VerifyMasks
    listed: torch.Tensor | None = None

    @staticmethod
    def of(
        source: torch.Tensor, req_rows: torch.Tensor, kv_start: torch.Tensor, kv_lens: torch.Tensor,
        query_offsets: torch.Tensor, prefix_lens: torch.Tensor, run: int, heads: Heads, tiles: Verify,
        masks: VerifyMasks, among: bool = False,
    ) -> VerifyStep:  # fmt: skip
        """With storage of its own. `kv_lens`: keys listed from `kv_start` on, this step's tokens among them.

        `among`: there may be requests of more than `tiles.max_new` tokens. `kv_start` follows the window
        already, that of the first token of each request.
        """
        device, rows = source.device, tiles.max_new * heads.group
        shape = (req_rows.shape[0] + tiles.keys.num_ranges, heads.num_kv, rows)
        work: Pieces = (
            torch.empty(*shape, heads.v_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )
        ranges = torch.empty(tiles.keys.num_ranges, FIELDS, dtype=torch.int32, device=device)
        own = torch.empty_like(kv_lens) if among else kv_lens
        dealt = DecodeStep(source, req_rows, kv_start, own, None, run, heads, tiles.keys, ranges, work)
        return VerifyStep(dealt, tiles, query_offsets, prefix_lens, masks, kv_lens if among else None)

    @cached_property
    def fixed(self) -> tuple[Fixed, Fixed]:
        """Arguments of verify and of its merge, the same for every layer."""
        dealt, masks, tiles = self.dealt, self.masks, self.tiles
        assert dealt.pieces is not None
        unused, heads = self.query_offsets, dealt.heads
        cells = unused if masks.cells is None else masks.cells
        if cells.dtype is torch.bool:
            cells = cells.view(torch.uint8)
        own = Fixed(
            dealt.source, dealt.req_rows, dealt.kv_start, dealt.kv_lens, dealt.ranges, *dealt.pieces,
            dealt.source.stride(0), self.query_offsets, self.prefix_lens,
            unused if masks.positions is None else masks.positions, cells,
            unused if masks.indptr is None else masks.indptr, tiles.row_blocks, tiles.max_new,
        )  # fmt: skip
        merge = Fixed(dealt.ranges, *dealt.pieces, self.query_offsets, tiles.max_new, heads.num_kv)
        return own, merge


def fill_verify(step: VerifyStep) -> None:  # anyattn: in-graph
    """Deal the step out, on the device."""
    if step.listed is not None:
        batch = step.listed.shape[0]
        launch(
            few_keys_kernel, (-(-batch // _FEW_BLOCK),),
            (step.query_offsets, step.listed, step.dealt.kv_lens, batch, step.tiles.max_new),
            {"BLOCK": _FEW_BLOCK}, num_warps=4, num_stages=1,
        )  # fmt: skip
    fill_ranges(step.dealt)


class _Layer:
    """What a layer's launches have in common in every step that is cut alike."""

    def __init__(
        self,
        cache: Cache,
        variant: Variant,
        step: VerifyStep,
        direct: bool,
        write_lse: bool,
        dtype: torch.dtype,
    ) -> None:
        tiles, keys, heads = step.tiles, step.tiles.keys, step.dealt.heads
        windowed, block_dv = variant.window is not None, max(16, power_of_two(heads.v_dim))
        rows, every = max(1, _MERGED_ELEMENTS // block_dv), max(1, keys.parts)
        self.grid = keys.num_ranges * tiles.row_blocks * heads.num_kv
        self.merge_grid = keys.num_ranges // every * -(-heads.num_q * tiles.max_new // rows)
        self.fixed = Fixed(
            cache.k, cache.v, cache.slot_map, cache.k_scale, cache.v_scale,
            *cache.k_strides, *cache.v_strides, *cache.scale_strides,
            variant.scale, variant.cap or 0.0, variant.window or 0, heads.num_kv,
        )  # fmt: skip
        shared = {"HAS_SINKS": variant.sinks is not None, "WRITE_LSE": write_lse}
        self.constexprs = {
            "PAGE": cache.page, "SUB": sub_page(cache.run or cache.page, keys.block_n),
            "GROUP": heads.group, "D": heads.dim, "DV": heads.v_dim,
            "BLOCK_D": max(16, power_of_two(heads.dim)), "BLOCK_DV": block_dv,
            "BLOCK_M": tiles.block_m, "BLOCK_N": keys.block_n,
            "DIRECT": direct, "MASK": step.masks.kind, "HAS_WINDOW": windowed,
            "POSITIONS": windowed and step.masks.positions is not None,
            "HAS_CAP": variant.cap is not None, **shared, "UPCAST": upcast(dtype),
            "HALF": tiles.half and dtype is not torch.float32,
            "FLAT": cache.flat, "WIDE": cache.wide, "ALIKE": cache.k_strides == cache.v_strides,
            "UNIT": keys.keys,
            "WALK": not keys.parts, "OVERLAP": keys.overlap,
        }  # fmt: skip
        self.merge_constexprs = {
            "GROUP": heads.group, "DV": heads.v_dim, "BLOCK_DV": block_dv, "ROWS": rows, **shared,
            "OVERLAP": keys.overlap > 0, "EVERY": every,
        }  # fmt: skip
        self.options = {"launch_pdl": True} if keys.overlap > 1 else {}
        self.merge_options = {"launch_pdl": True} if keys.overlap > 0 else {}
        self.merges = keys.split
        self.started: dict[tuple[Any, ...], tuple[Started, Started | None]] = {}


def verify(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: Cache,
    step: VerifyStep,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`q [T, Hq, D]` of ragged requests -> `out [T, Hq, Dv]`, `lse [T, Hq]` natural log.

    With `k`, `v` this step's own tokens are read from them; without, everything is in the pool. Layers have
    the heads that the step was made for, and are causal or masked.
    """
    own, merging = step.fixed
    layer = _layer(cache, variant, step, k is not None, lse is not None, q.dtype)
    k_arg, v_arg = (q, q) if k is None or v is None else (k, v)
    sinks = variant.sinks
    tensors = (q, k_arg, v_arg, out, lse, sinks)
    q_t, q_h, _ = q.stride()
    k_t, k_h, _ = k_arg.stride()
    v_t, v_h, _ = v_arg.stride()
    out_t, out_h, _ = out.stride()
    strides = (q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, 0 if lse is None else lse.stride(0))
    device = direct_device()
    if device < 0:
        _launch(layer, step, tensors, strides)
        return
    q_at, k_at, v_at, out_at = q.data_ptr(), k_arg.data_ptr(), v_arg.data_ptr(), out.data_ptr()
    lse_at = None if lse is None else lse.data_ptr()
    sinks_at = None if sinks is None else sinks.data_ptr()
    odd = (q_at | k_at | v_at | out_at | (lse_at or 0) | (sinks_at or 0)) & 15
    types = (k_arg.dtype, v_arg.dtype, out.dtype, sinks is None or sinks.dtype)
    known = (strides, own.key, merging.key, device, odd, types)
    started = layer.started.get(known)
    if started is None:
        started = _launch(layer, step, tensors, strides)
        if started is not None and odd == 0:  # of odd addresses, any may be the odd one
            layer.started[known] = started
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    attends, merges = started
    attends.start(stream, layer.grid, q_at, k_at, v_at, out_at, lse_at, sinks_at, *strides, *own.values)
    if merges is not None:
        merges.start(
            stream, layer.merge_grid, out_at, lse_at, sinks_at, out_t, out_h, strides[8], *merging.values
        )


def _layer(
    cache: Cache, variant: Variant, step: VerifyStep, direct: bool, write_lse: bool, dtype: torch.dtype
) -> _Layer:
    masks = step.masks
    key = (step.dealt.heads, step.tiles, masks.kind, masks.positions is None, direct, write_lse, dtype)
    layer: _Layer | None = cache.memo.get(key)
    if layer is None:
        layer = cache.memo[key] = _Layer(cache, variant, step, direct, write_lse, dtype)
    return layer


def _launch(
    layer: _Layer, step: VerifyStep, tensors: tuple[torch.Tensor | None, ...], strides: tuple[int, ...]
) -> tuple[Started, Started | None] | None:
    """Both launches by the ordinary seam; on the direct path, how to repeat them."""
    own, merging = step.fixed
    keys = step.tiles.keys
    compiled = launch(
        verify_kernel, (layer.grid,), (*tensors, *strides), layer.constexprs, (own, layer.fixed),
        num_warps=keys.num_warps, num_stages=keys.num_stages, **layer.options,
    )  # fmt: skip
    merge = None
    if layer.merges:
        merge = launch(
            merge_verify_kernel, (layer.merge_grid,), (*tensors[3:], *strides[6:]), layer.merge_constexprs,
            (merging,), num_warps=4, num_stages=1, **layer.merge_options,
        )  # fmt: skip
    if compiled is None:
        return None
    last = (*layer.fixed.values, *layer.constexprs.values())
    merging_last = tuple(layer.merge_constexprs.values())
    return Started(compiled, last), None if merge is None else Started(merge, merging_last)
