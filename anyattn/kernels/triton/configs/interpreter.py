"""Small tiles: the interpreter's tests, and the floor for architectures without a row."""

from __future__ import annotations

from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = ["DECODE", "EXTEND"]

_ARCHITECTURES = ("interpreter",)

DECODE = (
    DecodeRow(
        architectures=_ARCHITECTURES,
        max_dim=1024,
        max_itemsize=4,
        wide=Tile(32, 4, 1),
        narrow=Tile(16, 4, 1),
        evidence="smallest that tl.dot takes",
    ),
)

EXTEND = (
    ExtendRow(
        architectures=_ARCHITECTURES,
        max_dim=1024,
        max_itemsize=4,
        max_rows=16,
        block_m=16,
        tile=Tile(32, 4, 1),
        tma=(16, Tile(16, 4, 1)),
        evidence="as above",
    ),
    ExtendRow(
        architectures=_ARCHITECTURES,
        max_dim=1024,
        max_itemsize=4,
        block_m=32,
        tile=Tile(16, 4, 1),
        tma=(32, Tile(16, 4, 1)),
        evidence="as above",
    ),
)
