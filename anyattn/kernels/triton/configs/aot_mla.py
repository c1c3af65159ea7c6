"""Latent entries for ahead-of-time compilation, on DeepSeek's sizes, with the package's tiles.

anyattn verify-compile --configs anyattn.kernels.triton.configs.aot_mla:ENTRIES
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from anyattn.kernels.triton import mla
from anyattn.kernels.triton.aot import TARGETS, Entry, Target
from anyattn.kernels.triton.attention import Heads
from anyattn.kernels.triton.configs.mla import MLATiles, choose_mla, choose_mla_ranges
from anyattn.kernels.triton.decode_launch import DecodeStep

__all__ = ["ENTRIES", "HOPPER", "decode", "extend"]

_RANK, _ROPE, _PAGE, _BATCH, _CONTEXT = 512, 64, 64, 64, 8192
_FP8 = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1201")
"""Chips whose compiler converts the e4m3 type of their maker."""


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(target: Target, fp8: bool) -> mla.LatentCache:
    """More than 2^31 elements, as in service."""
    dtype = torch.bfloat16
    if fp8:
        dtype = torch.float8_e4m3fnuz if target.name == "gfx942" else torch.float8_e4m3fn
    pages = (1 << 31) // (_PAGE * (_RANK + _ROPE)) + 1
    rows = _empty(pages, _PAGE, 1, _RANK + _ROPE, dtype=dtype)
    return mla.LatentCache(rows, _empty(1, dtype=torch.float32), _RANK, fp8)


def _step(tokens: int, mask: bool) -> mla.MLAStep:
    return mla.MLAStep(
        _empty(257, 32768), _empty(_BATCH, dtype=torch.int64), _empty(_BATCH), _empty(_BATCH),
        _empty(_BATCH + 1),
        _empty(tokens * _CONTEXT, dtype=torch.bool) if mask else None,
        _empty(_BATCH + 1, dtype=torch.int64) if mask else None,
    )  # fmt: skip


def decode(
    heads: int, batch: int, fp8: bool, target: Target, tiles: MLATiles | None = None, even: bool = False
) -> None:
    """Decode, and the merge of what the chip's rule cuts. `tiles`: not those of the table."""
    tiles = tiles or choose_mla(heads, 1 if fp8 else 2, target.name.replace("_", ""))
    ranges = choose_mla_ranges(
        batch, mla.head_blocks(heads, tiles), _CONTEXT, tiles, target.units, even=even or batch == 1
    )
    own = _step(batch, False)
    sizes = Heads(heads, 1, _RANK + _ROPE, _RANK)
    step = DecodeStep.of(
        own.source, own.req_rows[:batch], own.seq_lens[:batch], own.seq_lens[:batch], None, _PAGE, sizes,
        ranges,
    )  # fmt: skip
    mla.mla_decode(
        _empty(batch, heads, _RANK + _ROPE, dtype=torch.bfloat16), _cache(target, fp8), step, tiles,
        192**-0.5, None, _empty(batch, heads, _RANK, dtype=torch.bfloat16), None,
    )  # fmt: skip


def extend(heads: int, new: int, mask: bool, target: Target, tiles: MLATiles | None = None) -> None:
    """Absorbed extend of `new` tokens a request."""
    tokens = _BATCH * new
    tiles = tiles or choose_mla(heads * new, 2, target.name.replace("_", ""), decode=False)
    mla.mla_extend(
        _empty(tokens, heads, _RANK + _ROPE, dtype=torch.bfloat16), _cache(target, False),
        _step(tokens, mask), tiles, 192**-0.5, None, None,
        _empty(tokens, heads, _RANK, dtype=torch.bfloat16), _empty(tokens, heads, dtype=torch.float32),
    )  # fmt: skip


_ALL = tuple(TARGETS)
_TWICE = "WMMA of RDNA 3 wants operands twice, and a row of latents is 512: the smallest spill that was found"
_CONVERTED = "a tile is converted in registers: the smallest spill that was found"
_WALK = "24 or 32 bytes, written and read once a request, not a tile: a walk's addresses beside the sums"
_WALK_64 = (
    "288 bytes, some read a tile: a walk beside sums of 64 x 512, where Hopper's own kernel doesn't run"
)
_FEW = "56 bytes: an accumulator of 64 x 512 leaves no register"


def _entry(
    name: str, build: Callable[[Target], None], *, fp8: bool = False, vectors: bool = True, **spills: str
) -> Entry:
    kernel = "mla_decode_kernel" if name.startswith("mla-decode") else "mla_extend_kernel"
    reasons = {"gfx1100": _TWICE, **spills}
    return Entry(name, build, _FP8 if fp8 else _ALL, kernel, True, reasons, 2 if vectors else 0)


ENTRIES: tuple[Entry, ...] = (
    _entry("mla-decode/16-heads", partial(decode, 16, _BATCH, False), sm_90=_WALK, sm_100=_WALK),
    _entry("mla-decode/16-heads-equal", partial(decode, 16, _BATCH, False, even=True)),
    _entry("mla-decode/16-heads-one-request", partial(decode, 16, 1, False)),
    _entry("mla-decode/128-heads", partial(decode, 128, _BATCH, False), sm_90=_WALK_64),
    # Reads aren't judged where a rope part of 64 bytes a token, or a mask, is read in small pieces.
    _entry(
        "mla-decode/128-heads-fp8",
        partial(decode, 128, _BATCH, True),
        fp8=True,
        vectors=False,
        gfx1201=_CONVERTED,
        sm_90=_WALK,
        sm_100=_WALK,
    ),
    _entry("mla-extend/128-heads-mask", partial(extend, 128, 4, True), vectors=False, sm_90=_FEW),
    _entry("mla-extend/16-heads", partial(extend, 16, 512, False), sm_90=_FEW),
)
"""Sixteen heads are a rank's share of 128."""

_KEYS, _ROWS = MLATiles(16, 64, 8, 2, "keys"), MLATiles(64, 64, 8, 2, "rows")


def _hopper(name: str, build: Callable[[Target], None], tiles: MLATiles) -> Entry:
    return Entry(f"mla-hopper/{name}", build, ("sm_90",), f"mla_{tiles.form}_kernel", True)


HOPPER: tuple[Entry, ...] = (
    _hopper("decode-16-heads", partial(decode, 16, _BATCH, False, tiles=_KEYS), _KEYS),
    _hopper("decode-16-heads-equal", partial(decode, 16, _BATCH, False, tiles=_KEYS, even=True), _KEYS),
    _hopper("decode-16-heads-fp8", partial(decode, 16, _BATCH, True, tiles=_KEYS), _KEYS),
    _hopper("decode-128-heads", partial(decode, 128, _BATCH, False, tiles=_ROWS), _ROWS),
    _hopper("decode-128-heads-equal", partial(decode, 128, _BATCH, False, tiles=_ROWS, even=True), _ROWS),
    _hopper("decode-128-heads-fp8", partial(decode, 128, _BATCH, True, tiles=_ROWS), _ROWS),
    _hopper("decode-128-heads-one-request", partial(decode, 128, 1, False, tiles=_ROWS), _ROWS),
    _hopper("extend-128-heads-mask", partial(extend, 128, 4, True, tiles=_ROWS), _ROWS),
    _hopper("extend-16-heads", partial(extend, 16, 512, False, tiles=_ROWS), _ROWS),
)
"""Those in Gluon, for `mla_hopper_launch.GLUON_VERSIONS`."""
