"""Tiles for AMD GPUs, chosen from compiler reports (docs/compile-table.md): nothing ran on one."""

from __future__ import annotations

from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = ["DECODE", "EXTEND"]

_CDNA = ("gfx90a", "gfx942")  # 64 KiB of LDS
_CDNA4 = ("gfx950",)  # 160 KiB
_RDNA = ("gfx1100", "gfx1151", "gfx1200", "gfx1201")
_ALL = (*_CDNA, *_CDNA4, *_RDNA)
_COMPILED = "compiler reports only"

DECODE = (
    DecodeRow(
        architectures=(*_CDNA, *_CDNA4),
        max_dim=64,
        wide=Tile(128, 4, 2),
        narrow=Tile(64, 4, 2),
        evidence=_COMPILED,
    ),
    DecodeRow(
        architectures=(*_CDNA, *_CDNA4),
        max_dim=128,
        wide=Tile(64, 4, 2),
        narrow=Tile(64, 4, 2),
        evidence=_COMPILED,
    ),
    DecodeRow(
        architectures=(*_CDNA, *_CDNA4),
        max_dim=256,
        wide=Tile(32, 4, 2),
        narrow=Tile(32, 4, 2),
        evidence=_COMPILED,
    ),
    DecodeRow(
        architectures=_RDNA, max_dim=128, wide=Tile(32, 4, 1), narrow=Tile(32, 4, 1), evidence=_COMPILED
    ),
    DecodeRow(
        architectures=_ALL,
        max_dim=1024,
        max_itemsize=4,
        wide=Tile(16, 4, 1),
        narrow=Tile(16, 4, 1),
        evidence=_COMPILED,
    ),
)

EXTEND = (
    ExtendRow(
        architectures=(*_CDNA, *_CDNA4),
        max_dim=128,
        max_rows=16,
        block_m=16,
        tile=Tile(64, 4, 1),
        evidence=_COMPILED,
    ),
    ExtendRow(
        architectures=(*_CDNA, *_CDNA4), max_dim=128, block_m=128, tile=Tile(64, 4, 1), evidence=_COMPILED
    ),
    ExtendRow(
        architectures=(*_CDNA, *_CDNA4), max_dim=256, block_m=64, tile=Tile(32, 4, 1), evidence=_COMPILED
    ),
    ExtendRow(
        architectures=_ALL,
        max_dim=1024,
        max_itemsize=4,
        max_rows=16,
        block_m=16,
        tile=Tile(16, 4, 1),
        evidence=_COMPILED,
    ),
    ExtendRow(
        architectures=_ALL, max_dim=1024, max_itemsize=4, block_m=32, tile=Tile(16, 4, 1), evidence=_COMPILED
    ),
)
