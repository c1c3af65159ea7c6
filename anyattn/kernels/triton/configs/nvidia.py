"""Tiles for NVIDIA GPUs. sm90 was measured on an H200; the others are chosen from compiler reports
(registers, spills, shared memory): see docs/compile-table.md.
"""

from __future__ import annotations

from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = ["DECODE", "EXTEND"]

_SM90 = ("sm90",)
_LARGE = ("sm80", "sm100", "sm103", "sm110")  # 160 KiB or more of shared memory a program
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KiB
_ALL = (*_SM90, *_LARGE, *_SMALL)
_MEASURED = "H200, 31 shapes under CUDA graphs, geometric mean 1.087 of FlashInfer (2026-11-29)"
_COMPILED = "compiler reports only"

DECODE = (
    DecodeRow(
        architectures=(*_SM90, *_LARGE),
        max_dim=64,
        wide=Tile(256, 4, 3),
        narrow=Tile(128, 4, 4),
        evidence=_MEASURED,
    ),
    DecodeRow(
        architectures=(*_SM90, *_LARGE),
        max_dim=128,
        wide=Tile(128, 4, 3),
        narrow=Tile(64, 4, 4),
        evidence=_MEASURED,
    ),
    DecodeRow(
        architectures=(*_SM90, *_LARGE),
        max_dim=256,
        wide=Tile(64, 4, 3),
        narrow=Tile(32, 4, 4),
        evidence=_MEASURED,
    ),
    DecodeRow(
        architectures=_SMALL, max_dim=64, wide=Tile(128, 4, 3), narrow=Tile(64, 4, 3), evidence=_COMPILED
    ),
    DecodeRow(
        architectures=_SMALL, max_dim=128, wide=Tile(64, 4, 3), narrow=Tile(32, 4, 3), evidence=_COMPILED
    ),
    DecodeRow(
        architectures=_SMALL, max_dim=256, wide=Tile(32, 4, 3), narrow=Tile(16, 4, 3), evidence=_COMPILED
    ),
    DecodeRow(
        architectures=_ALL,
        max_dim=128,
        max_itemsize=4,
        wide=Tile(32, 4, 2),
        narrow=Tile(32, 4, 2),
        evidence=_COMPILED,
    ),
    DecodeRow(
        architectures=_ALL,
        max_dim=1024,
        max_itemsize=4,
        wide=Tile(16, 4, 2),
        narrow=Tile(16, 4, 2),
        evidence=_COMPILED,
    ),
)

EXTEND = (
    ExtendRow(
        architectures=_ALL, max_dim=128, max_rows=16, block_m=16, tile=Tile(64, 4, 2), evidence=_COMPILED
    ),
    ExtendRow(
        architectures=_ALL, max_dim=256, max_rows=16, block_m=16, tile=Tile(32, 4, 2), evidence=_COMPILED
    ),
    ExtendRow(
        architectures=(*_SM90, *_LARGE),
        max_dim=128,
        block_m=64,
        tile=Tile(64, 4, 3),
        evidence="H200, 2026-11-29, page 16: 428 (8k), 448 (16k + 512) TFLOP/s; 128 x 64 with 8 warps 386, 387",
    ),
    ExtendRow(architectures=_SMALL, max_dim=128, block_m=64, tile=Tile(32, 4, 2), evidence=_COMPILED),
    ExtendRow(
        architectures=(*_SM90, *_LARGE), max_dim=256, block_m=64, tile=Tile(32, 4, 2), evidence=_COMPILED
    ),
    ExtendRow(architectures=_SMALL, max_dim=256, block_m=32, tile=Tile(16, 4, 2), evidence=_COMPILED),
    ExtendRow(
        architectures=_ALL,
        max_dim=1024,
        max_itemsize=4,
        max_rows=16,
        block_m=16,
        tile=Tile(16, 4, 2),
        evidence=_COMPILED,
    ),
    ExtendRow(
        architectures=_ALL, max_dim=1024, max_itemsize=4, block_m=32, tile=Tile(16, 4, 2), evidence=_COMPILED
    ),
)
