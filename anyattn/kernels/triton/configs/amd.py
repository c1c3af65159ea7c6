"""Tiles for AMD GPUs, chosen from the reports of Triton 3.7.1 (docs/compile-table.md): nothing ran on one."""

from __future__ import annotations

from functools import partial

from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = ["DECODE", "EXTEND"]

_CDNA = ("gfx90a", "gfx942", "gfx950")  # 64 KiB of LDS, the last 160
_RDNA3 = ("gfx1100", "gfx1151")
_RDNA4 = ("gfx1200", "gfx1201")
_RDNA = (*_RDNA3, *_RDNA4)

_decode = partial(DecodeRow, evidence="compiler reports only")
_extend = partial(ExtendRow, evidence="compiler reports only")

# WMMA of RDNA 3 wants each operand twice, once in either half of a wave: one of 16 x 256 fills 128 of the 256
# registers, and a tile has two, so no tile of any size is clean.
_TWICE = "16 rows of 256 fill 128 registers, queries and keys 256: the smallest spill that was found"
# Float32 is multiplied without matrix instructions: a thread holds whole rows.
_WHOLE_ROW = "a row of 256 fills the 256 registers of a thread: the smallest spill that was found"

DECODE = (
    _decode(architectures=_CDNA, max_dim=64, wide=Tile(128, 4, 2), narrow=Tile(64, 4, 2)),
    _decode(architectures=_CDNA, max_dim=128, wide=Tile(64, 4, 2), narrow=Tile(64, 4, 2)),
    _decode(architectures=_CDNA, max_dim=256, wide=Tile(32, 4, 2), narrow=Tile(32, 4, 2)),
    _decode(architectures=_RDNA, max_dim=64, wide=Tile(32, 4, 1), narrow=Tile(32, 4, 1)),
    _decode(architectures=_RDNA3, max_dim=128, wide=Tile(16, 8, 1), narrow=Tile(16, 8, 1)),
    _decode(architectures=_RDNA4, max_dim=128, wide=Tile(32, 8, 1), narrow=Tile(32, 8, 1)),
    _decode(architectures=_RDNA3, max_dim=256, wide=Tile(16, 16, 1), narrow=Tile(16, 16, 1), evidence=_TWICE),
    _decode(architectures=_RDNA4, max_dim=256, wide=Tile(16, 8, 1), narrow=Tile(16, 8, 1)),
    # Float32.
    _decode(architectures=_CDNA, max_dim=256, max_itemsize=4, wide=Tile(16, 4, 1), narrow=Tile(16, 4, 1)),
    _decode(architectures=_RDNA, max_dim=64, max_itemsize=4, wide=Tile(16, 8, 1), narrow=Tile(16, 8, 1)),
    _decode(architectures=_RDNA, max_dim=128, max_itemsize=4, wide=Tile(16, 16, 1), narrow=Tile(16, 16, 1)),
    _decode(
        architectures=_RDNA,
        max_dim=256,
        max_itemsize=4,
        wide=Tile(16, 16, 1),
        narrow=Tile(16, 16, 1),
        evidence=_WHOLE_ROW,
    ),
)

EXTEND = (
    _extend(architectures=_CDNA, max_dim=128, max_rows=16, block_m=16, tile=Tile(64, 4, 1)),
    _extend(architectures=_CDNA, max_dim=128, max_rows=64, block_m=64, tile=Tile(64, 4, 1)),
    _extend(architectures=_CDNA, max_dim=128, block_m=128, tile=Tile(64, 4, 1)),
    _extend(architectures=_CDNA, max_dim=256, max_rows=16, block_m=16, tile=Tile(32, 4, 1)),
    _extend(architectures=_CDNA, max_dim=256, block_m=64, tile=Tile(32, 4, 1)),
    _extend(architectures=_RDNA, max_dim=64, max_rows=16, block_m=16, tile=Tile(32, 4, 1)),
    _extend(architectures=_RDNA, max_dim=64, max_rows=64, block_m=64, tile=Tile(32, 8, 1)),
    _extend(architectures=_RDNA, max_dim=64, block_m=128, tile=Tile(32, 8, 1)),
    _extend(
        architectures=_RDNA3,
        max_dim=128,
        max_rows=16,
        block_m=16,
        tile=Tile(16, 16, 1),
        triton=("3.6.", "3.9."),
        evidence="compiler reports of 3.6.0 and 3.9.0, where 8 warps spill with an explicit mask",
    ),
    _extend(architectures=_RDNA3, max_dim=128, max_rows=16, block_m=16, tile=Tile(16, 8, 1)),
    _extend(architectures=_RDNA3, max_dim=128, block_m=32, tile=Tile(16, 8, 1)),
    _extend(architectures=_RDNA4, max_dim=128, max_rows=16, block_m=16, tile=Tile(32, 4, 1)),
    _extend(architectures=_RDNA4, max_dim=128, block_m=64, tile=Tile(32, 8, 1)),
    _extend(
        architectures=_RDNA3, max_dim=256, max_rows=16, block_m=16, tile=Tile(16, 16, 1), evidence=_TWICE
    ),
    _extend(architectures=_RDNA3, max_dim=256, block_m=32, tile=Tile(16, 16, 1), evidence=_TWICE),
    _extend(architectures=_RDNA4, max_dim=256, max_rows=16, block_m=16, tile=Tile(16, 4, 1)),
    _extend(architectures=_RDNA4, max_dim=256, block_m=32, tile=Tile(16, 8, 1)),
    # Float32.
    _extend(architectures=_CDNA, max_dim=256, max_itemsize=4, max_rows=16, block_m=16, tile=Tile(16, 4, 1)),
    _extend(architectures=_CDNA, max_dim=256, max_itemsize=4, block_m=32, tile=Tile(16, 4, 1)),
    _extend(architectures=_RDNA, max_dim=64, max_itemsize=4, block_m=16, tile=Tile(16, 8, 1)),
    _extend(architectures=_RDNA, max_dim=128, max_itemsize=4, block_m=16, tile=Tile(16, 16, 1)),
    _extend(
        architectures=_RDNA,
        max_dim=256,
        max_itemsize=4,
        block_m=16,
        tile=Tile(16, 16, 1),
        evidence=_WHOLE_ROW,
    ),
)
