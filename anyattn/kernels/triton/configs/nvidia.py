"""Tiles for NVIDIA GPUs. sm90 was measured on an H200; the others are chosen from compiler reports
(registers, spills, shared memory): see docs/compile-table.md.
"""

from __future__ import annotations

from functools import partial

from anyattn.kernels.triton.configs.rows import DecodeRow, ExtendRow, Tile

__all__ = ["DECODE", "EXTEND"]

_SM90 = ("sm90",)
_SM80 = ("sm80", "sm87")  # 163 KB of shared memory a program
_SM100 = ("sm100", "sm103", "sm110")  # 227 KB
_LARGE = (*_SM90, *_SM80, *_SM100)
_SMALL = ("sm86", "sm89", "sm120", "sm121")  # 99 KB
_ALL = (*_LARGE, *_SMALL)
_COMPILED = "compiler reports only"
_MEASURED = (
    "H200, 31 shapes under CUDA graphs, geometric mean 1.087 of FlashInfer (2026-11-29); sm80 and sm100: "
    "compiler reports only"
)

_decode = partial(DecodeRow, evidence=_COMPILED)
_hopper = partial(
    DecodeRow,
    architectures=_SM90,
    evidence="H200, 2026-11-29, 33 shapes under CUDA graphs: equal parts, and ranges with each of 10 tiles",
)
_fp8 = partial(
    _hopper,
    max_kv_itemsize=1,
    half=True,
    walk_always="always",
    evidence="H200, 2026-11-30: the fastest of 8 to 13 tiles in 5 shapes of D 64 and 128 (D 64, 16 x 8k: "
    "54.4 us alone; 63.9 in the benchmark in tiles of 64, four an SM); D 256: compiler reports",
)
_extend = partial(ExtendRow, evidence=_COMPILED)
_SHORT_BY_HAND = (128, Tile(128, 4, 2))
"""By hand, of 65 to 256 query rows a request, as of more."""

DECODE = (
    _fp8(max_dim=64, wide=Tile(256, 8, 4), narrow=Tile(128, 4, 4), walk=Tile(128, 4, 4)),
    _fp8(max_dim=128, wide=Tile(128, 8, 4), narrow=Tile(64, 4, 4), walk=Tile(64, 4, 4), overlap=2),
    _fp8(max_dim=256, wide=Tile(64, 8, 4), narrow=Tile(32, 4, 4), walk=Tile(32, 4, 4)),
    _hopper(
        max_dim=64, wide=Tile(256, 4, 3), narrow=Tile(128, 4, 4), walk=Tile(128, 4, 3), walk_always="uneven"
    ),
    # V at K's offsets: 1 x 8192 took 15.4 us instead of 15.8, 16 x 8192 of one KV head 23.9 instead of 24.6;
    # in tiles that walk (64 x 8192 of one KV head) 80.9 instead of 75.0.
    _hopper(
        max_dim=128, wide=Tile(128, 4, 3), narrow=Tile(64, 4, 4), walk=Tile(64, 4, 3), overlap=2, alike=True
    ),
    _hopper(
        max_dim=256, wide=Tile(64, 4, 3), narrow=Tile(32, 4, 4), walk=Tile(32, 4, 3), walk_always="uneven"
    ),
    _decode(
        architectures=_LARGE, max_dim=64, wide=Tile(256, 4, 3), narrow=Tile(128, 4, 4), evidence=_MEASURED
    ),
    _decode(
        architectures=_LARGE, max_dim=128, wide=Tile(128, 4, 3), narrow=Tile(64, 4, 4), evidence=_MEASURED
    ),
    _decode(
        architectures=_LARGE, max_dim=256, wide=Tile(64, 4, 3), narrow=Tile(32, 4, 4), evidence=_MEASURED
    ),
    _decode(architectures=_SMALL, max_dim=64, wide=Tile(128, 4, 3), narrow=Tile(64, 4, 3)),
    _decode(architectures=_SMALL, max_dim=128, wide=Tile(64, 4, 3), narrow=Tile(32, 4, 3)),
    _decode(architectures=_SMALL, max_dim=256, wide=Tile(32, 4, 3), narrow=Tile(16, 4, 3)),
    # Float32 is multiplied without tensor cores: threads hold whole rows, and other tiles spill.
    _decode(architectures=_ALL, max_dim=128, max_itemsize=4, wide=Tile(32, 8, 2), narrow=Tile(32, 8, 2)),
    _decode(architectures=_SM90, max_dim=256, max_itemsize=4, wide=Tile(16, 4, 2), narrow=Tile(16, 4, 2)),
    _decode(architectures=_ALL, max_dim=256, max_itemsize=4, wide=Tile(32, 8, 2), narrow=Tile(32, 8, 2)),
)

EXTEND = (
    _extend(architectures=_LARGE, max_dim=128, max_rows=16, block_m=16, tile=Tile(64, 4, 2)),
    _extend(architectures=("sm86", "sm89"), max_dim=128, max_rows=16, block_m=16, tile=Tile(32, 4, 3)),
    _extend(architectures=("sm120", "sm121"), max_dim=128, max_rows=16, block_m=16, tile=Tile(32, 4, 2)),
    _extend(architectures=_ALL, max_dim=256, max_rows=16, block_m=16, tile=Tile(32, 4, 2)),
    _extend(
        architectures=_SM90,
        max_dim=128,
        max_rows=64,
        block_m=64,
        tile=Tile(64, 4, 3),
        tma=(64, Tile(64, 4, 3)),
    ),
    _extend(
        architectures=_SM90,
        max_dim=128,
        max_rows=256,
        block_m=64,
        tile=Tile(64, 4, 3),
        tma=(64, Tile(64, 4, 3)),
        hopper=_SHORT_BY_HAND,
        evidence="H200, 2026-11-30, us by hand / by pointers / FA3: 64 x (2k + 64) page 16 271 / 399 / 284, "
        "page 64 265 / 427 / 313; 128 x ~2.5k + 17: 420 / 577 / 387, page 64 395 / 531 / 371; "
        "64 x (2k + 32): 161 / 218 / 179",
    ),
    _extend(
        architectures=_SM90,
        max_dim=128,
        block_m=64,
        tile=Tile(64, 4, 3),
        tma=(64, Tile(64, 4, 3)),
        hopper=(128, Tile(128, 4, 2)),
        evidence="H200, 2026-11-29, of the best FA3: by hand 0.92 to 0.99 without a prefix, 1.12 (page 16) "
        "and 1.16 (64) at 16k + 512; descriptors 0.68 to 0.81, pointers 0.64 to 0.73",
    ),
    _extend(architectures=_SM90, max_dim=256, block_m=64, tile=Tile(32, 8, 2), hopper=(128, Tile(64, 4, 2))),
    _extend(architectures=_SM80, max_dim=128, max_rows=64, block_m=64, tile=Tile(32, 4, 3)),
    _extend(architectures=_SM80, max_dim=128, block_m=128, tile=Tile(32, 8, 2)),
    _extend(architectures=_SM100, max_dim=128, max_rows=64, block_m=64, tile=Tile(32, 4, 3)),
    _extend(architectures=_SM100, max_dim=128, block_m=128, tile=Tile(64, 8, 2), tma=(128, Tile(64, 8, 2))),
    _extend(architectures=_SMALL, max_dim=128, max_rows=64, block_m=64, tile=Tile(32, 4, 2)),
    _extend(architectures=_SMALL, max_dim=128, block_m=128, tile=Tile(32, 8, 2)),
    _extend(architectures=_ALL, max_dim=256, block_m=64, tile=Tile(32, 8, 2)),
    # Float32.
    _extend(architectures=_ALL, max_dim=64, max_itemsize=4, max_rows=16, block_m=16, tile=Tile(16, 8, 2)),
    _extend(architectures=_ALL, max_dim=64, max_itemsize=4, block_m=32, tile=Tile(32, 8, 2)),
    _extend(architectures=("sm80",), max_dim=128, max_itemsize=4, block_m=16, tile=Tile(32, 8, 2)),
    _extend(
        architectures=("sm87", *_SM90, *_SM100, "sm120", "sm121"),
        max_dim=128,
        max_itemsize=4,
        block_m=16,
        tile=Tile(16, 8, 2),
    ),
    _extend(architectures=_ALL, max_dim=256, max_itemsize=4, block_m=16, tile=Tile(16, 8, 2)),
)
