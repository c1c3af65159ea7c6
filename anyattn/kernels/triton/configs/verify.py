"""Steps whose keys are cut because their row blocks would leave the chip idle, and their tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from anyattn.kernels.triton.configs.rows import Tile

__all__ = ["DEFAULT", "VERIFY", "VerifyRow"]


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """Cut steps of requests of at most `max_rows` query rows (tokens x query heads of a KV head).

    `block_m`, `tile`: rows and keys of a program; no tile = that of the extend kernel for 16 rows, which has
    the same loop.
    `programs_per_unit`: so many of them are on an SM or CU at once. `fill`: a step is cut whose row blocks
    are at most so many a unit; `min_keys`: and whose requests may have so many keys. `overlap`: as in
    `DecodeRow`, for short programs. `wide`: instead of `tile` where one program a unit holds each request
    whole, and more than `WIDE_TILES` of them; `alone`: where programs are one a unit otherwise.
    `few`, `few_per_unit`: instead of `tile` and
    `programs_per_unit` for the few rows of requests beside others that have many; such a step is split in two
    where the row blocks of all would take `few_gain` times as long. On an H200, that split two steps of four
    (596 us to 477, 618 to 504) and left two whole (537, which would be 549, and 1,138, 1,140). `half`: 8-bit
    keys are multiplied as float16. `evidence`: where it comes from.
    """

    architectures: tuple[str, ...]
    max_dim: int
    max_rows: int
    block_m: int
    tile: Tile | None = None
    max_itemsize: int = 2
    programs_per_unit: int = 1
    fill: float = 1.0
    min_keys: int = 1024
    overlap: int = 0
    wide: Tile | None = None
    alone: Tile | None = None
    few: Tile | None = None
    few_per_unit: int = 0
    few_gain: float = 1.03
    half: bool = False
    evidence: str = ""


_COMPILED = "compiler reports only"
_wide = partial(VerifyRow, max_dim=128, max_rows=256, block_m=32, evidence=_COMPILED)
_hopper = partial(
    _wide,
    architectures=("sm90",),
    max_rows=512,
    programs_per_unit=2,
    fill=1.5,
    overlap=2,
    half=True,
    tile=Tile(64, 4, 3),
    evidence="H200, 2026-11-30, 14 shapes: the fastest of 3 to 9 tiles in most, two programs an SM; three "
    "stages and the early start 4 to 5 % faster than four without in 5 shapes of 4 and 8 drafts",
)

VERIFY = (
    # One request of 8k tokens and 4 drafts: 17.2 us in wide tiles, 17.9 in those of 64.
    _hopper(max_rows=16, block_m=16, fill=2.0, few=Tile(64, 4, 4), few_per_unit=2, alone=Tile(128, 4, 3)),
    _hopper(max_rows=32, wide=Tile(128, 4, 3)),
    _hopper(block_m=64),
    _wide(architectures=("sm80", "sm87", "sm100", "sm103", "sm110"), tile=Tile(32, 4, 3)),
    _wide(architectures=("sm86", "sm89", "sm120", "sm121")),
    _wide(architectures=("gfx90a", "gfx942", "gfx950")),
    VerifyRow(
        architectures=("interpreter",),
        max_dim=1024,
        max_itemsize=4,
        max_rows=64,
        block_m=16,
        tile=Tile(16, 4, 1),
        programs_per_unit=2,
        fill=8.0,
        min_keys=33,
        few_gain=0.0,
        evidence="smallest that tl.dot takes",
    ),
)

DEFAULT = VerifyRow(
    architectures=(), max_dim=1024, max_itemsize=4, max_rows=128, block_m=16, evidence=_COMPILED
)
"""Of what has no row: other chips, larger heads, float32."""
