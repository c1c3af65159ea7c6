"""Host side of the latent kernels: plain tensors in, launches out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.kernels.triton.attention import Cache, kv_write
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.configs.mla import MLATiles
from anyattn.kernels.triton.decode_launch import DecodeStep, Pieces
from anyattn.kernels.triton.launch import interpreting, launch
from anyattn.kernels.triton.merge import merge_kernel, merge_ranges_kernel
from anyattn.kernels.triton.mla_decode import mla_decode_kernel
from anyattn.kernels.triton.mla_extend import mla_extend_kernel
from anyattn.kernels.triton.mla_hopper_launch import (
    launch_keys,
    launch_rows,
    launch_rows_decode,
    pack_of,
    walks,
)

__all__ = [
    "LatentCache",
    "MLAStep",
    "Partials",
    "extend_blocks",
    "head_blocks",
    "mla_decode",
    "mla_extend",
    "mla_partials",
]

_MERGED = 32  # partials of 512 that 8 warps hold in 64 registers each
_WALKED = 16  # most requests are cut in few pieces
Partials = tuple[torch.Tensor, torch.Tensor]
"""`([rows, Hq, S, rank], [rows, Hq, S])` in float32."""


@dataclass(frozen=True, eq=False)
class LatentCache:
    """Latents of one layer `[pages, P, 1, rank + rope]`, and their scale, float32 `[1]` on the device.

    `run`: as in `attention.Cache`.
    """

    rows: torch.Tensor
    scale: torch.Tensor
    rank: int
    scaled: bool
    run: int = 0

    @property
    def page(self) -> int:
        """Tokens a page holds."""
        return self.rows.shape[1]

    @property
    def rope(self) -> int:
        """Size of the rotated part."""
        return self.rows.shape[3] - self.rank

    def write(self, k: torch.Tensor, loc: torch.Tensor) -> None:
        """Store `k [T, 1, rank + rope]` at slots `loc int64 [T]`: each part once, scaled once, saturated."""
        parts = Cache.of(
            self.rows[..., : self.rank], self.rows[..., self.rank :], "NHD", self.scale, self.scale,
            self.scaled,
        )  # fmt: skip
        kv_write(k[..., : self.rank], k[..., self.rank :], parts, loc)


@dataclass(frozen=True, eq=False)
class MLAStep:
    """The parts of a plan that extend reads. A mask has `extend_len x seq_len` cells a request."""

    source: torch.Tensor
    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    query_offsets: torch.Tensor
    mask_cells: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


def head_blocks(heads: int, tiles: MLATiles) -> int:
    """Programs of a range in decode."""
    if tiles.form == "rows":
        return heads // pack_of(heads, tiles.block_rows)
    return -(-heads // tiles.block_rows)


def extend_blocks(heads: int, tokens: int, tiles: MLATiles) -> int:
    """Programs of a request that adds `tokens`, without splits."""
    pack = pack_of(heads, tiles.block_rows)
    return heads // pack * -(-tokens // (tiles.block_rows // pack))


def mla_partials(rows: int, heads: int, rank: int, splits: int, device: torch.device) -> Partials | None:
    """Split-KV workspace of extends, or None without splits. Rows that nobody writes merge to zero."""
    if splits == 1:
        return None
    shape = (rows, heads, splits)
    return (
        torch.empty(*shape, rank, dtype=torch.float32, device=device),
        torch.full(shape, float("-inf"), dtype=torch.float32, device=device),
    )


def _common(q: torch.Tensor, cache: LatentCache, tiles: MLATiles) -> dict[str, object]:
    rows, run = cache.rows, cache.run or cache.page
    return {
        "BLOCK_C": max(16, power_of_two(cache.rank)), "BLOCK_R": max(16, power_of_two(cache.rope)),
        # The interpreter's `tl.dot` is wrong for bf16 (silently): it computes in float32 there.
        "UPCAST": interpreting() and q.dtype is torch.bfloat16,
        "FLAT": rows.stride(0) == rows.stride(1) * cache.page, "WIDE": rows.numel() >= 1 << 31,
        "SUB": min(run & -run, tiles.block_n),
    }  # fmt: skip


def mla_decode(
    q: torch.Tensor,
    cache: LatentCache,
    step: DecodeStep,
    tiles: MLATiles,
    scale: float,
    cap: float | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    work: Pieces | None = None,
) -> None:
    """`q [B, Hq, rank + rope]` against each request's latents -> `out [B, Hq, rank]`, `lse [B, Hq]`.

    `work`: workspace in place of the step's, for layers with other heads.
    """
    parts = work or step.pieces or (out, step.ranges)
    if tiles.form == "rows":
        launch_rows_decode(q, cache, step, tiles, scale, parts, out, lse)
    elif tiles.form == "keys":
        launch_keys(q, cache, step, tiles, scale, parts, out, lse)
    else:
        _portable_decode(q, cache, step, tiles, scale, cap, parts, out, lse)
    if step.tiles.split:
        _merge_ranges(step, parts, out, lse)


def _portable_decode(
    q: torch.Tensor,
    cache: LatentCache,
    step: DecodeStep,
    tiles: MLATiles,
    scale: float,
    cap: float | None,
    parts: Pieces,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    lse_arg = step.ranges if lse is None else lse
    args = (
        q, cache.rows, step.source, step.req_rows, step.kv_lens, step.ranges, cache.scale, out, lse_arg,
        *parts, q.stride(0), q.stride(1), cache.rows.stride(0), cache.rows.stride(1), step.source.stride(0),
        out.stride(0), out.stride(1), lse_arg.stride(0), scale, cap or 0.0,
    )  # fmt: skip
    shared = _common(q, cache, tiles)
    constexprs = {
        "PAGE": cache.page, "SUB": shared["SUB"], "HEADS": q.shape[1], "RANK": cache.rank, "ROPE": cache.rope,
        "BLOCK_C": shared["BLOCK_C"], "BLOCK_R": shared["BLOCK_R"], "BLOCK_H": tiles.block_rows,
        "BLOCK_N": tiles.block_n, "HAS_CAP": cap is not None, "WRITE_LSE": lse is not None,
        "SPLIT": step.tiles.split, "WALK": walks(step), "UPCAST": shared["UPCAST"], "FLAT": shared["FLAT"],
        "WIDE": shared["WIDE"],
    }  # fmt: skip
    grid = (step.tiles.num_ranges * head_blocks(q.shape[1], tiles),)
    launch(mla_decode_kernel, grid, args, constexprs, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def _merge_ranges(step: DecodeStep, parts: Pieces, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    heads, rank = out.shape[1:]
    every = max(1, step.tiles.parts)
    args = (
        out, lse, None, out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), heads,
        step.ranges, *parts,
    )  # fmt: skip
    block_s = min(_MERGED, power_of_two(step.tiles.parts)) if step.tiles.parts else _WALKED
    constexprs = {
        "DV": rank, "BLOCK_DV": max(16, power_of_two(rank)), "BLOCK_S": block_s, "HAS_SINKS": False,
        "WRITE_LSE": lse is not None, "OVERLAP": False, "EVERY": every,
    }  # fmt: skip
    grid = (step.tiles.num_ranges // every * heads,)
    launch(merge_ranges_kernel, grid, args, constexprs, num_warps=max(2, block_s // 4), num_stages=2)


def _merge(workspace: Partials, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    part_out, part_lse = workspace
    rows, heads, splits, rank = part_out.shape
    lse_arg = part_lse if lse is None else lse
    args = (
        part_out, part_lse, out, out, lse_arg, out.stride(0), out.stride(1), lse_arg.stride(0), heads, splits
    )  # fmt: skip
    block_s = min(_MERGED, power_of_two(splits))
    constexprs = {
        "DV": rank, "BLOCK_DV": max(16, power_of_two(rank)), "BLOCK_S": block_s,
        "HAS_SINKS": False, "WRITE_LSE": lse is not None,
    }  # fmt: skip
    launch(merge_kernel, (rows * heads,), args, constexprs, num_warps=max(2, block_s // 4), num_stages=2)


def mla_extend(
    q: torch.Tensor,
    cache: LatentCache,
    step: MLAStep,
    tiles: MLATiles,
    scale: float,
    cap: float | None,
    workspace: Partials | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`q [T, Hq, rank + rope]` of ragged requests -> `out [T, Hq, rank]`, `lse [T, Hq]`."""
    parts = (out, step.seq_lens, 1) if workspace is None else (*workspace, workspace[1].shape[2])
    if tiles.form == "rows":
        launch_rows(q, cache, step, tiles, scale, parts, out, lse)
    else:
        _portable_extend(q, cache, step, tiles, scale, cap, parts, out, lse)
    if workspace is not None:
        _merge(workspace, out, lse)


def _portable_extend(
    q: torch.Tensor,
    cache: LatentCache,
    step: MLAStep,
    tiles: MLATiles,
    scale: float,
    cap: float | None,
    parts: tuple[torch.Tensor, torch.Tensor, int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    heads, requests = q.shape[1], step.req_rows.shape[0]
    pack = pack_of(heads, tiles.block_rows)
    num_blocks = q.shape[0] // (tiles.block_rows // pack) + requests
    part_out, part_lse, splits = parts
    lse_arg = step.seq_lens if lse is None else lse
    cells = step.seq_lens if step.mask_cells is None else step.mask_cells
    if cells.dtype is torch.bool:
        cells = cells.view(torch.uint8)
    args = (
        q, cache.rows, step.source, step.req_rows, step.query_offsets, step.prefix_lens, cells,
        step.seq_lens if step.mask_indptr is None else step.mask_indptr, cache.scale, out, lse_arg,
        part_out, part_lse,
        q.stride(0), q.stride(1), cache.rows.stride(0), cache.rows.stride(1), step.source.stride(0),
        out.stride(0), out.stride(1), lse_arg.stride(0), scale, cap or 0.0, requests, num_blocks,
        splits, 2 if splits > 1 else 1,
    )  # fmt: skip
    shared = _common(q, cache, tiles)
    constexprs = {
        "PAGE": cache.page, "SUB": shared["SUB"], "HEADS": heads, "PACK": pack,
        "RANK": cache.rank, "ROPE": cache.rope, "BLOCK_C": shared["BLOCK_C"], "BLOCK_R": shared["BLOCK_R"],
        "BLOCK_M": tiles.block_rows, "BLOCK_N": tiles.block_n, "HAS_MASK": step.mask_cells is not None,
        "HAS_CAP": cap is not None, "WRITE_LSE": lse is not None, "SPLIT": splits > 1,
        "UPCAST": shared["UPCAST"], "FLAT": shared["FLAT"], "WIDE": shared["WIDE"],
    }  # fmt: skip
    launch(
        mla_extend_kernel, (num_blocks * (heads // pack) * splits,), args, constexprs,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
