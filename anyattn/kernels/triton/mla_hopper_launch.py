"""Host side of the Hopper kernels of latent attention: where they run, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from anyattn.kernels.triton.launch import interpreting, launch

if TYPE_CHECKING:
    from anyattn.kernels.triton.configs.mla import MLATiles
    from anyattn.kernels.triton.decode_launch import DecodeStep
    from anyattn.kernels.triton.mla import LatentCache, MLAStep

__all__ = [
    "GLUON_VERSIONS",
    "PORTABLE",
    "launch_keys",
    "launch_rows",
    "launch_rows_decode",
    "mla_forms",
    "pack_of",
    "walks",
]

GLUON_VERSIONS = ("3.6.", "3.7.")
"""Triton versions whose Gluon these kernels were compiled with; it has no stable interface yet."""

PORTABLE = ("portable",)
_ROWS = 64


def mla_forms(
    arch: str,
    dtype: torch.dtype,
    stored: torch.dtype,
    rank: int,
    rope: int,
    cap: float | None,
    version: str = triton.__version__,
) -> tuple[str, ...]:
    """Kernels that take these sizes: `portable`, `rows` (blocks of 64 rows), `keys` (few heads).

    Hopper's are made for DeepSeek's sizes, of which shared memory holds two tiles and a block of queries, and
    for half precision: latents are `stored` as such, and copied as they are, or in 8 bits, and converted.
    """
    fits = (rank, rope) == (512, 64) and cap is None
    half = dtype in (torch.bfloat16, torch.float16) and (stored is dtype or stored.itemsize == 1)
    if arch == "sm90" and half and fits and version.startswith(GLUON_VERSIONS) and not interpreting():
        return (*PORTABLE, "rows", "keys")
    return PORTABLE


def pack_of(heads: int, rows: int) -> int:
    """Heads of a token in one block: the largest divisor of `heads` that fits."""
    return next(n for n in range(min(heads, rows), 0, -1) if heads % n == 0)


def launch_rows(
    q: torch.Tensor,
    cache: LatentCache,
    step: MLAStep,
    tiles: MLATiles,
    scale: float,
    parts: tuple[torch.Tensor, torch.Tensor, int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Extend in blocks of 64 query rows; `parts`: partial outputs, LSEs, and how many splits they are for."""
    heads, requests = q.shape[1], step.req_rows.shape[0]
    pack = pack_of(heads, _ROWS)
    num_blocks = q.shape[0] // (_ROWS // pack) + requests
    part_out, part_lse, splits = parts
    unused = step.seq_lens
    cells = unused if step.mask_cells is None else step.mask_cells
    if cells.dtype is torch.bool:
        cells = cells.view(torch.uint8)
    tensors = (
        q, cache.rows, step.source, step.req_rows, step.seq_lens, step.query_offsets, step.prefix_lens, cells,
        unused if step.mask_indptr is None else step.mask_indptr, unused, cache.scale,
        out, unused if lse is None else lse, part_out, part_lse,
    )  # fmt: skip
    numbers = (requests, num_blocks, splits, 2 if splits > 1 else 1)
    _rows(
        q, cache, step.source, tiles, scale, tensors, numbers, num_blocks * splits, out, lse,
        decode=False, mask=step.mask_cells is not None, split=splits > 1, walk=False,
    )  # fmt: skip


def launch_rows_decode(
    q: torch.Tensor,
    cache: LatentCache,
    step: DecodeStep,
    tiles: MLATiles,
    scale: float,
    parts: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Decode in blocks of 64 heads; `parts`: where pieces of cut requests go."""
    unused, lens = step.ranges, step.kv_lens
    tensors = (
        q, cache.rows, step.source, step.req_rows, lens, unused, unused, unused, unused, step.ranges,
        cache.scale, out, unused if lse is None else lse, *parts,
    )  # fmt: skip
    _rows(
        q, cache, step.source, tiles, scale, tensors, (0, 0, 1, 1), step.tiles.num_ranges, out, lse,
        decode=True, mask=False, split=step.tiles.split, walk=walks(step),
    )  # fmt: skip


def _rows(
    q: torch.Tensor, cache: LatentCache, source: torch.Tensor, tiles: MLATiles, scale: float,
    tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...], blocks: int, out: torch.Tensor,
    lse: torch.Tensor | None, *, decode: bool, mask: bool, split: bool, walk: bool,
) -> None:  # fmt: skip
    from anyattn.kernels.triton.mla_hopper import mla_rows_kernel

    heads = q.shape[1]
    pack = pack_of(heads, _ROWS)
    args = (*tensors, *_strides(q, cache, source, out, lse), scale, *numbers)
    constexprs = {
        "PAGE": cache.page, "HEADS": heads, "PACK": pack, "RANK": cache.rank, "ROPE": cache.rope,
        "BLOCK_N": tiles.block_n, "DECODE": decode, "HAS_MASK": mask,
        **_common(cache, tiles, lse, split, walk), "HELD": cache.rows.element_size() > 1,
    }  # fmt: skip
    grid = (blocks * (heads // pack),)
    launch(mla_rows_kernel, grid, args, constexprs, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def launch_keys(
    q: torch.Tensor,
    cache: LatentCache,
    step: DecodeStep,
    tiles: MLATiles,
    scale: float,
    parts: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Decode with heads as the columns of each product."""
    from anyattn.kernels.triton.mla_hopper_keys import mla_keys_kernel

    heads = q.shape[1]
    args = (
        q, cache.rows, step.source, step.req_rows, step.kv_lens, step.ranges, cache.scale,
        out, step.ranges if lse is None else lse, *parts, *_strides(q, cache, step.source, out, lse), scale,
    )  # fmt: skip
    constexprs = {
        "PAGE": cache.page, "HEADS": heads, "BLOCK_H": tiles.block_rows, "RANK": cache.rank,
        "ROPE": cache.rope, "BLOCK_N": tiles.block_n,
        **_common(cache, tiles, lse, step.tiles.split, walks(step)),
    }  # fmt: skip
    grid = (step.tiles.num_ranges * -(-heads // tiles.block_rows),)
    launch(mla_keys_kernel, grid, args, constexprs, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def walks(step: DecodeStep) -> bool:
    """Ranges may hold several requests."""
    return step.tiles.split and not step.tiles.parts


def _strides(
    q: torch.Tensor, cache: LatentCache, source: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[int, ...]:
    rows, lse_t = cache.rows, 1 if lse is None else lse.stride(0)
    return (
        q.stride(0), q.stride(1), rows.stride(0), rows.stride(1), source.stride(0),
        out.stride(0), out.stride(1), lse_t,
    )  # fmt: skip


def _common(
    cache: LatentCache, tiles: MLATiles, lse: torch.Tensor | None, split: bool, walk: bool
) -> dict[str, Any]:
    rows = cache.rows
    return {
        "WRITE_LSE": lse is not None, "SPLIT": split, "WALK": walk,
        "FLAT": rows.stride(0) == rows.stride(1) * cache.page, "FP8": rows.element_size() == 1,
        "WARPS": tiles.num_warps,
    }  # fmt: skip
