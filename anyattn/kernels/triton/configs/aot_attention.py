"""Attention entries for ahead-of-time compilation: one `Shape` each, with the package's tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from anyattn.kernels.triton import attention as kernels
from anyattn.kernels.triton.aot import TARGETS, Entry, Target
from anyattn.kernels.triton.configs.choose import choose_decode, choose_extend
from anyattn.kernels.triton.decode_launch import DecodeStep, fill_ranges
from anyattn.kernels.triton.decode_launch import decode as decode_layer
from anyattn.kernels.triton.extend_launch import GLUON_VERSIONS, ExtendStep
from anyattn.kernels.triton.extend_launch import extend as extend_layer

__all__ = [
    "ENTRIES",
    "FP8_TARGETS",
    "RDNA3_WIDE_HEADS",
    "RDNA_WIDE_FLOAT32",
    "Shape",
    "attention_entry",
    "cache_of",
    "decode",
    "empty",
    "extend",
    "variant_of",
    "write",
]

FP8_TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1201")
"""Chips whose compiler converts the e4m3 type of their maker."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer and one step of service.

    `batch` requests with `context` cached tokens; an extend adds `new` tokens each. K of a layer has
    more than 2^31 elements, so offsets are 64 bits wide and AMD's compiler can't use its buffer loads;
    `small` pools have fewer. `mapped`: slots are translated first. `fresh`: nothing is cached.
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
    small: bool = False
    mapped: bool = False
    fresh: bool = False
    layout: str = "NHD"

    @property
    def heads(self) -> kernels.Heads:
        """As the host functions take them."""
        return kernels.Heads(self.q_heads, self.kv_heads, self.dim, self.v_dim or self.dim)

    def kv_dtype(self, target: Target) -> torch.dtype:
        """The pool's type: e4m3 in the flavour of the target's maker, or the model's type."""
        if not self.fp8:
            return self.dtype
        return torch.float8_e4m3fnuz if target.name == "gfx942" else torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _arch(target: Target) -> str:
    return target.name.replace("_", "")


def cache_of(shape: Shape, target: Target) -> kernels.Cache:
    """One layer's K and V in the target's types."""
    heads, dtype = shape.heads, shape.kv_dtype(target)
    elements = 1 << (28 if shape.small else 31)
    pages = elements // (shape.page * heads.num_kv * min(heads.dim, heads.v_dim)) + 1
    rows = (shape.page, heads.num_kv) if shape.layout == "NHD" else (heads.num_kv, shape.page)
    k, v = (empty(pages, *rows, dim, dtype=dtype) for dim in (heads.dim, heads.v_dim))
    scale = empty(1, dtype=torch.float32)
    slot_map = empty(pages * shape.page) if shape.mapped else None
    return kernels.Cache.of(k, v, shape.layout, scale, scale, shape.fp8, slot_map)


def variant_of(shape: Shape) -> kernels.Variant:
    """What its layer asks for."""
    sinks = empty(shape.q_heads, dtype=torch.float32) if shape.sinks else None
    return kernels.Variant(shape.dim**-0.5, shape.cap, shape.window, sinks, shape.causal)


def decode(shape: Shape, target: Target) -> None:
    """Ranges, decode, and the merge of what they cut."""
    heads, rows = shape.heads, shape.batch
    cache = cache_of(shape, target)
    itemsize = max(shape.dtype.itemsize, cache.k.dtype.itemsize)
    tiles = choose_decode(
        rows,
        kernels.decode_programs(heads),
        shape.window or shape.context,
        max(heads.dim, heads.v_dim),
        itemsize,
        _arch(target),
        target.units,
        heads=heads.block,
        kv_itemsize=cache.k.dtype.itemsize,
        even=rows == 1,
        run=shape.page,
    )
    step = DecodeStep.of(
        empty(257, 32768), empty(rows, dtype=torch.int64), empty(rows), empty(rows),
        shape.window, shape.page, heads, tiles,
    )  # fmt: skip
    fill_ranges(step)
    decode_layer(
        empty(rows, heads.num_q, heads.dim, dtype=shape.dtype),
        cache,
        step,
        heads,
        variant_of(shape),
        empty(rows, heads.num_q, heads.v_dim, dtype=shape.dtype),
        empty(rows, heads.num_q, dtype=torch.float32) if shape.lse else None,
    )


def extend(shape: Shape, target: Target, kernel: str = "extend_kernel") -> None:
    """Extend by `new` tokens a request on top of `context` cached ones, with the kernel of that name."""
    heads, rows, tokens = shape.heads, shape.batch, shape.batch * shape.new
    cache = cache_of(shape, target)
    itemsize = max(shape.dtype.itemsize, cache.k.dtype.itemsize)
    tiles = choose_extend(shape.new * heads.group, max(heads.dim, heads.v_dim), itemsize, _arch(target))
    tiles = replace(
        tiles,
        tma=tiles.tma if kernel == "extend_tma_kernel" else None,
        hopper=tiles.hopper if kernel == "extend_hopper_kernel" else None,
    )
    step = ExtendStep(
        source=empty(257, 32768),
        req_rows=empty(rows, dtype=torch.int64),
        query_offsets=empty(rows + 1),
        prefix_lens=empty(rows),
        pool_lens=None if shape.fresh else empty(rows),
        kv_start=empty(rows),
        positions=empty(tokens, dtype=torch.int64) if shape.mask else None,
        mask_cells=empty(tokens * shape.context, dtype=torch.bool) if shape.mask else None,
        mask_indptr=empty(rows + 1, dtype=torch.int64) if shape.mask else None,
    )
    extend_layer(
        empty(tokens, heads.num_q, heads.dim, dtype=shape.dtype),
        empty(tokens, heads.num_kv, heads.dim, dtype=shape.dtype) if shape.direct else None,
        empty(tokens, heads.num_kv, heads.v_dim, dtype=shape.dtype) if shape.direct else None,
        cache,
        step,
        heads,
        variant_of(shape),
        tiles,
        empty(tokens, heads.num_q, heads.v_dim, dtype=shape.dtype),
        empty(tokens, heads.num_q, dtype=torch.float32) if shape.lse else None,
    )


def write(shape: Shape, target: Target) -> None:
    """KV write of `batch` tokens."""
    heads, tokens = shape.heads, shape.batch
    k = empty(tokens, heads.num_kv, heads.dim, dtype=shape.dtype)
    v = empty(tokens, heads.num_kv, heads.v_dim, dtype=shape.dtype)
    kernels.kv_write(k, v, cache_of(shape, target), empty(tokens, dtype=torch.int64))


_EXTENDS = ("extend_kernel", "extend_tma_kernel", "extend_hopper_kernel")
_BUILD: dict[str, Callable[[Shape, Target], None]] = {
    "ranges_kernel": decode,
    "decode_kernel": decode,
    "merge_ranges_kernel": decode,
    **{name: partial(extend, kernel=name) for name in _EXTENDS},
    "kv_write_kernel": write,
}


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
    paged = kernel == "decode_kernel" or kernel in _EXTENDS
    dots = paged and shape.dtype is not torch.float32
    reads = 1 if shape.fp8 else shape.dtype.itemsize
    return Entry(
        name, partial(_BUILD[kernel], shape), chips, kernel, dots, spills or {}, reads if paged else 0
    )


RDNA3_WIDE_HEADS = {
    "gfx1100": "operands of RDNA 3's matrix instructions are held twice, once in either half of a wave: "
    "queries and keys of 256 take all 256 registers, with the smallest tiles too. The catalog calls these "
    "head sizes degraded"
}
RDNA_WIDE_FLOAT32 = dict.fromkeys(
    ("gfx1100", "gfx1201"),
    "float32 is multiplied without matrix instructions: a query row of 256 takes all 256 registers of a "
    "thread. The catalog calls it degraded",
)

RDNA3_WIDE_GROUP = {
    "gfx1100": "64 rows of 128 are 128 registers with half the threads of a wave holding the same: what "
    "walks from request to request finds no room"
}
BETWEEN_REQUESTS = dict.fromkeys(
    ("sm_80", "sm_89", "sm_120"),
    "two registers of what is needed between requests alone, so that a block more fits on an SM",
)

_WIDE_GROUP = Shape(q_heads=64, kv_heads=1)
_WINDOW_SINKS = Shape(q_heads=64, dim=64, window=128, sinks=True)
_CAP_256 = Shape(q_heads=16, dim=256, cap=50.0)
_PLAIN_256 = replace(_CAP_256, cap=None)
_UNEQUAL = Shape(kv_heads=32, dim=192, v_dim=128, page=64)
_FLOAT32 = Shape(dtype=torch.float32)
_FLOAT32_256 = replace(_PLAIN_256, dtype=torch.float32)
_SMALL_HND = Shape(dtype=torch.float16, small=True, layout="HND")
_FRESH = Shape(new=512, fresh=True)
_PAGE_64 = Shape(new=512, direct=False, page=64)
_BETWEEN_BLOCKS = {"sm_90": "a few registers, once a block of rows, outside of the loops over tiles"}
_A_NUMBER = {"sm_90": "a thread's number, read again twice a tile by one of the two warpgroups"}
_THIRD_BLOCK = "two to four registers, for a third block per SM"
_MAPPED_ON = ("sm_90", "gfx942", "gfx1201")

_decode = partial(attention_entry, kernel="decode_kernel")
_extend = partial(attention_entry, kernel="extend_kernel")
_extend_hopper = partial(
    attention_entry, kernel="extend_hopper_kernel", targets=("sm_90",), spills=_BETWEEN_BLOCKS
)
_extend_tma = partial(attention_entry, kernel="extend_tma_kernel", targets=("sm_90", "sm_100"))

_IN_GLUON = (
    _extend_hopper("extend/d128-hopper", shape=_FRESH),
    _extend_hopper("extend/d128-page-16-hopper", shape=replace(_PAGE_64, page=16)),
    _extend_hopper(
        "extend/d128-group-of-7-window-hopper",
        shape=replace(_PAGE_64, q_heads=28, kv_heads=4, page=16, window=1024),
    ),
    _extend_hopper(
        "extend/d256-hopper", shape=replace(_FRESH, q_heads=16, kv_heads=2, dim=256), spills=_A_NUMBER
    ),
    _extend_hopper(
        "extend/d64-page-64-hopper", shape=replace(_PAGE_64, dim=64, cap=30.0, sinks=True, lse=True)
    ),
)
"""Where Triton is another, `extend_kernel` runs in their place."""

ENTRIES: tuple[Entry, ...] = (
    _decode("decode/d128", shape=Shape()),
    _decode("decode/d128-one-request", shape=Shape(batch=1)),
    _decode("decode/d128-one-long-request", shape=Shape(batch=1, context=131_072)),
    _decode("decode/d128-small-pool-hnd-float16", shape=_SMALL_HND),
    _decode("decode/d128-slot-map", shape=Shape(mapped=True), targets=_MAPPED_ON),
    _decode("decode/d128-64-query-heads-per-kv-head", shape=_WIDE_GROUP, spills=RDNA3_WIDE_GROUP),
    _decode("decode/d64-window-sinks", shape=_WINDOW_SINKS),
    _decode("decode/d64-one-request", shape=Shape(dim=64, batch=1)),
    _decode("decode/d80-page-1", shape=Shape(kv_heads=32, dim=80, page=1)),
    _decode("decode/d192-v128", shape=_UNEQUAL, spills=RDNA3_WIDE_HEADS),
    _decode("decode/d256-cap", shape=_CAP_256, spills={**RDNA3_WIDE_HEADS, "sm_90": _THIRD_BLOCK}),
    _decode("decode/d256-one-request", shape=replace(_PLAIN_256, batch=1), spills=RDNA3_WIDE_HEADS),
    _decode("decode/d128-fp8", shape=Shape(fp8=True)),
    _decode("decode/d256-fp8", shape=replace(_PLAIN_256, fp8=True)),
    _decode("decode/d128-float32", shape=_FLOAT32, spills=BETWEEN_REQUESTS),
    _decode("decode/d256-float32", shape=_FLOAT32_256, spills={**RDNA_WIDE_FLOAT32, **BETWEEN_REQUESTS}),
    attention_entry("ranges/64-requests", "ranges_kernel", Shape()),
    attention_entry("ranges/512-requests-window", "ranges_kernel", Shape(batch=512, window=1024)),
    attention_entry("merge/d128", "merge_ranges_kernel", Shape(batch=1), spills=BETWEEN_REQUESTS),
    _extend("extend/d128", shape=Shape(new=512)),
    _extend("extend/d128-paged", shape=Shape(new=512, direct=False)),
    _extend("extend/d128-paged-small-pool-hnd-float16", shape=replace(_SMALL_HND, new=512, direct=False)),
    _extend("extend/d128-64-rows", shape=Shape(new=16, direct=False)),
    _extend("extend/d128-verify-mask", shape=Shape(new=4, mask=True)),
    _extend("extend/d64-window-sinks", shape=replace(_WINDOW_SINKS, new=512)),
    _extend("extend/d80-bidirectional", shape=Shape(kv_heads=32, dim=80, causal=False, new=512, lse=True)),
    _extend("extend/d192-v128", shape=replace(_UNEQUAL, new=512), spills=RDNA3_WIDE_HEADS),
    _extend("extend/d256-cap", shape=replace(_CAP_256, new=512), spills=RDNA3_WIDE_HEADS),
    _extend(
        "extend/d256-verify-mask",
        shape=replace(_PLAIN_256, new=4, mask=True),
        spills={**RDNA3_WIDE_HEADS, "sm_90": _THIRD_BLOCK},
    ),
    _extend("extend/d128-fp8", shape=Shape(fp8=True, new=512)),
    _extend("extend/d256-fp8", shape=replace(_PLAIN_256, fp8=True, new=512)),
    _extend("extend/d128-float32", shape=replace(_FLOAT32, new=512)),
    _extend(
        "extend/d256-float32",
        shape=replace(_FLOAT32_256, new=512),
        spills={**RDNA_WIDE_FLOAT32, "sm_86": _THIRD_BLOCK, "sm_89": _THIRD_BLOCK},
    ),
    *(_IN_GLUON if triton.__version__.startswith(GLUON_VERSIONS) else ()),
    _extend_tma("extend/d128-tma", shape=_FRESH),
    _extend_tma("extend/d128-page-64-window-tma", shape=replace(_PAGE_64, window=1024)),
    attention_entry("kv-write/d128", "kv_write_kernel", Shape(batch=4096)),
    attention_entry("kv-write/d128-fp8", "kv_write_kernel", Shape(batch=4096, fp8=True)),
)
"""Shapes of common models, and one of each feature."""
