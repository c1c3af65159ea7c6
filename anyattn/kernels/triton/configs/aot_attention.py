"""Attention entries for ahead-of-time compilation: one `Shape` each, tiles as the package chooses them there.

anyattn verify-compile --configs anyattn.kernels.triton.configs.aot_attention:ENTRIES
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from anyattn.kernels.triton import attention as kernels
from anyattn.kernels.triton.aot import TARGETS, Entry, Target
from anyattn.kernels.triton.configs.choose import choose_decode, choose_extend

__all__ = ["ENTRIES", "FP8_TARGETS", "Shape", "attention_entry", "decode", "extend", "write"]

FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1201")
"""Chips whose compiler converts the e4m3 type of their maker."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer and one step of service.

    `batch` requests with `context` cached tokens; an extend adds `new` tokens each. K of a layer is larger
    than 2 GiB, as it is in service: below, AMD's compiler takes another path.
    """

    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    v_dim: int = 0
    page: int = 16
    batch: int = 64
    context: int = 8192
    new: int = 1
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    causal: bool = True
    lse: bool = False
    mask: bool = False
    direct: bool = True

    @property
    def heads(self) -> kernels.Heads:
        """As the host functions take them."""
        return kernels.Heads(self.q_heads, self.kv_heads, self.dim, self.v_dim or self.dim)

    def kv_dtype(self, target: Target) -> torch.dtype:
        """The pool's type: e4m3 in the flavour of the target's maker, or the model's type."""
        if not self.fp8:
            return self.dtype
        return torch.float8_e4m3fnuz if target.name == "gfx942" else torch.float8_e4m3fn


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _arch(target: Target) -> str:
    return target.name.replace("_", "")


def _cache(shape: Shape, target: Target) -> kernels.Cache:
    heads, dtype = shape.heads, shape.kv_dtype(target)
    pages = (1 << 31) // (shape.page * heads.num_kv * min(heads.dim, heads.v_dim)) + 1
    k = _empty(pages, shape.page, heads.num_kv, heads.dim, dtype=dtype)
    v = _empty(pages, shape.page, heads.num_kv, heads.v_dim, dtype=dtype)
    scale = _empty(1, dtype=torch.float32)
    return kernels.Cache.of(k, v, "NHD", scale, scale, shape.fp8)


def _variant(shape: Shape) -> kernels.Variant:
    sinks = _empty(shape.q_heads, dtype=torch.float32) if shape.sinks else None
    return kernels.Variant(shape.dim**-0.5, shape.cap, shape.window, sinks, shape.causal)


def decode(shape: Shape, target: Target) -> None:
    """Decode, and the merge of its splits where the chip's rule splits."""
    heads, rows = shape.heads, shape.batch
    cache = _cache(shape, target)
    itemsize = max(shape.dtype.itemsize, cache.k.dtype.itemsize)
    tiles = choose_decode(
        rows * kernels.decode_programs(heads),
        shape.window or shape.context,
        max(heads.dim, heads.v_dim),
        itemsize,
        _arch(target),
        target.units,
    )
    kernels.decode(
        _empty(rows, heads.num_q, heads.dim, dtype=shape.dtype),
        cache,
        _empty(257, 32768),
        _empty(rows, dtype=torch.int64),
        _empty(rows),
        _empty(rows),
        heads,
        _variant(shape),
        tiles,
        kernels.partials(rows, heads, tiles, torch.device("meta")),
        _empty(rows, heads.num_q, heads.v_dim, dtype=shape.dtype),
        _empty(rows, heads.num_q, dtype=torch.float32) if shape.lse else None,
    )


def extend(shape: Shape, target: Target) -> None:
    """Extend by `new` tokens a request on top of `context` cached ones."""
    heads, rows, tokens = shape.heads, shape.batch, shape.batch * shape.new
    cache = _cache(shape, target)
    itemsize = max(shape.dtype.itemsize, cache.k.dtype.itemsize)
    tiles = choose_extend(shape.new * heads.group, max(heads.dim, heads.v_dim), itemsize, _arch(target))
    step = kernels.ExtendStep(
        source=_empty(257, 32768),
        req_rows=_empty(rows, dtype=torch.int64),
        query_offsets=_empty(rows + 1),
        prefix_lens=_empty(rows),
        pool_lens=_empty(rows),
        kv_start=_empty(rows),
        positions=_empty(tokens, dtype=torch.int64) if shape.mask else None,
        mask_cells=_empty(tokens * shape.context, dtype=torch.bool) if shape.mask else None,
        mask_indptr=_empty(rows + 1, dtype=torch.int64) if shape.mask else None,
    )
    kernels.extend(
        _empty(tokens, heads.num_q, heads.dim, dtype=shape.dtype),
        _empty(tokens, heads.num_kv, heads.dim, dtype=shape.dtype) if shape.direct else None,
        _empty(tokens, heads.num_kv, heads.v_dim, dtype=shape.dtype) if shape.direct else None,
        cache,
        step,
        heads,
        _variant(shape),
        tiles,
        _empty(tokens, heads.num_q, heads.v_dim, dtype=shape.dtype),
        _empty(tokens, heads.num_q, dtype=torch.float32) if shape.lse else None,
    )


def write(shape: Shape, target: Target) -> None:
    """KV write of `batch` tokens."""
    heads, tokens = shape.heads, shape.batch
    k = _empty(tokens, heads.num_kv, heads.dim, dtype=shape.dtype)
    v = _empty(tokens, heads.num_kv, heads.v_dim, dtype=shape.dtype)
    kernels.kv_write(k, v, _cache(shape, target), _empty(tokens, dtype=torch.int64))


_BUILD = {"decode_kernel": decode, "merge_kernel": decode, "extend_kernel": extend, "kv_write_kernel": write}


def attention_entry(
    name: str,
    kernel: str,
    shape: Shape,
    *,
    targets: Sequence[str] | None = None,
    spills: Mapping[str, str] | None = None,
) -> Entry:
    """The entry of one kernel on one shape. Default targets: all, for fp8 those that convert it."""
    chips = targets or (FP8_TARGETS if shape.fp8 else tuple(TARGETS))
    # Float32 is computed without tensor cores: tf32 is off.
    dots = kernel in ("decode_kernel", "extend_kernel") and shape.dtype is not torch.float32
    return Entry(name, partial(_BUILD[kernel], shape), chips, kernel, dots, spills or {})


_WINDOW_SINKS = Shape(q_heads=64, dim=64, window=128, sinks=True)
_CAP_256 = Shape(q_heads=16, dim=256, cap=50.0)
_UNEQUAL = Shape(kv_heads=32, dim=192, v_dim=128, page=64)
_FLOAT32 = Shape(dtype=torch.float32)

ENTRIES: tuple[Entry, ...] = (
    attention_entry("decode/d128", "decode_kernel", Shape()),
    attention_entry("decode/d128-one-request", "decode_kernel", Shape(batch=1)),
    attention_entry("decode/d64-window-sinks", "decode_kernel", _WINDOW_SINKS),
    attention_entry("decode/d80-page-1", "decode_kernel", Shape(kv_heads=32, dim=80, page=1)),
    attention_entry("decode/d192-v128", "decode_kernel", _UNEQUAL),
    attention_entry("decode/d256-cap", "decode_kernel", _CAP_256),
    attention_entry("decode/d256-one-request", "decode_kernel", replace(_CAP_256, cap=None, batch=1)),
    attention_entry("decode/d128-fp8", "decode_kernel", Shape(fp8=True)),
    attention_entry("decode/d128-float32", "decode_kernel", _FLOAT32),
    attention_entry("merge/d128", "merge_kernel", Shape(batch=1)),
    attention_entry("extend/d128", "extend_kernel", Shape(new=512)),
    attention_entry("extend/d128-paged", "extend_kernel", Shape(new=512, direct=False)),
    attention_entry("extend/d128-64-rows", "extend_kernel", Shape(new=16)),
    attention_entry("extend/d128-verify-mask", "extend_kernel", Shape(new=4, mask=True)),
    attention_entry("extend/d64-window-sinks", "extend_kernel", replace(_WINDOW_SINKS, new=512)),
    attention_entry(
        "extend/d80-bidirectional", "extend_kernel",
        Shape(kv_heads=32, dim=80, causal=False, new=512, lse=True),
    ),
    attention_entry("extend/d192-v128", "extend_kernel", replace(_UNEQUAL, new=512)),
    attention_entry("extend/d256-cap", "extend_kernel", replace(_CAP_256, new=512)),
    attention_entry("extend/d128-fp8", "extend_kernel", Shape(fp8=True, new=512)),
    attention_entry("extend/d128-float32", "extend_kernel", replace(_FLOAT32, new=512)),
    attention_entry("kv-write/d128", "kv_write_kernel", Shape(batch=4096)),
    attention_entry("kv-write/d128-fp8", "kv_write_kernel", Shape(batch=4096, fp8=True)),
)  # fmt: skip
"""Shapes of common models, and one of each feature."""
