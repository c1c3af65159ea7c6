"""What the attention kernels are given: caches, heads, variants; and the KV write."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from anyattn.core.hashing import hashed_once
from anyattn.kernels.triton.configs.choose import power_of_two
from anyattn.kernels.triton.kv_write import kv_write_kernel
from anyattn.kernels.triton.launch import Fixed, Started, direct_device, interpreting, launch

__all__ = [
    "Cache",
    "Heads",
    "Variant",
    "decode_programs",
    "kv_write",
    "pairs",
    "started_write",
    "sub_page",
    "upcast",
]

_PAIRED = (torch.float8_e4m3fn, torch.float8_e5m2)
_SMALLEST = 16  # elements of a head that are an operand of `tl.dot`


@dataclass(frozen=True, eq=False)
class Cache:
    """Paged K and V of one layer with their strides, whatever the layout.

    `k`, `v`: storage; strides in elements between pages, rows of a page and heads. `k_scale`, `v_scale`:
    float32 `[1]` or `[Hkv]` on the device. `slot_map`: int32 `[S]`, request tables list slots of another pool
    and `slot_map[slot]` is the one here; None = no translation. `run`: tokens that are sure to lie in
    consecutive slots (the table's granularity), 0 = a page.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    page: int
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    scaled: bool
    slot_map: torch.Tensor | None = None
    run: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)
    """Constexprs of this layer's launches: the same every step."""

    @cached_property
    def flat(self) -> bool:
        """Slot s lies at `s * row stride`."""
        return all(s[0] == s[1] * self.page for s in (self.k_strides, self.v_strides))

    @cached_property
    def scale_strides(self) -> tuple[int, int]:
        """Of k and v scales over heads: 0 where one scale serves all."""
        return int(self.k_scale.shape[0] > 1), int(self.v_scale.shape[0] > 1)

    @cached_property
    def largest(self) -> float:
        """What 8-bit storage saturates at; 0 for wider types."""
        return torch.finfo(self.k.dtype).max if self.k.dtype.itemsize == 1 else 0.0

    @cached_property
    def wide(self) -> bool:
        """Element offsets pass 2^31."""
        return max(self.k.numel(), self.v.numel()) >= 1 << 31

    @staticmethod
    def of(
        k: torch.Tensor, v: torch.Tensor, layout: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
        scaled: bool, slot_map: torch.Tensor | None = None, run: int = 0,
    ) -> Cache:  # fmt: skip
        """From `[pages, P, Hkv, D]` (NHD) or `[pages, Hkv, P, D]` (HND)."""
        row, head = (1, 2) if layout == "NHD" else (2, 1)
        return Cache(
            k, v,
            (k.stride(0), k.stride(row), k.stride(head)), (v.stride(0), v.stride(row), v.stride(head)),
            k.shape[row], k_scale, v_scale, scaled, slot_map, run,
        )  # fmt: skip


@hashed_once
@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of one layer."""

    num_q: int
    num_kv: int
    dim: int
    v_dim: int

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q // self.num_kv

    @cached_property
    def block(self) -> int:
        """Query heads of a KV head in one decode program; `tl.dot` takes 16 rows at least."""
        return max(16, min(64, power_of_two(self.group)))


@dataclass(frozen=True, eq=False)
class Variant:
    """What a layer asks for beyond plain attention."""

    scale: float
    cap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True


def sub_page(run: int, block_n: int) -> int:
    """Consecutive tokens one table entry serves: the largest power of two in the run, at most a tile."""
    return min(run & -run, block_n)


def upcast(dtype: torch.dtype) -> bool:
    """The interpreter's `tl.dot` is wrong for bf16 (silently): it computes in float32 there."""
    return interpreting() and dtype is torch.bfloat16


def pairs(cache: Cache, heads: Heads, dtype: torch.dtype) -> int:
    """How decode splits 16-bit words of an 8-bit cache: 0 it reads bytes, 1 by shifts (interpreted), 2 by an
    instruction that sm_89 has. Bytes are for what no word is whole of, and where half a head is no operand.
    """
    words = cache.k.dtype in _PAIRED and cache.v.dtype is cache.k.dtype and dtype is not torch.float32
    numbers = (*cache.k_strides, *cache.v_strides, heads.dim, heads.v_dim)
    even = not any(n % 2 for n in (*numbers, cache.k.data_ptr(), cache.v.data_ptr()))
    if not words or not even or min(heads.dim, heads.v_dim) <= _SMALLEST:
        return 0
    return 1 if interpreting() else 2


def decode_programs(heads: Heads) -> int:
    """Programs per request, without splits."""
    return heads.num_kv * -(-heads.group // heads.block)


def kv_write(k: torch.Tensor, v: torch.Tensor, cache: Cache, loc: torch.Tensor) -> None:
    """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at slots `loc int64 [T]`: scaled once, saturated."""
    tokens, num_kv, dim = k.shape
    if tokens == 0:
        return
    k_t, k_h, _ = k.stride()
    v_t, v_h, _ = v.stride()
    strides, v_dim, device = (k_t, k_h, v_t, v_h), v.shape[2], direct_device()
    key = (num_kv, dim, v_dim)
    writer = cache.memo.get(key)
    if writer is None:
        writer = cache.memo[key] = _Writer(cache, num_kv, dim, v_dim)
    known = (strides, k.dtype, v.dtype, loc.dtype, device)
    if device >= 0:
        places = k.data_ptr(), v.data_ptr(), loc.data_ptr()
        aligned = (places[0] | places[1] | places[2]) & 15 == 0
        started = writer.started.get(known)
        if started is not None and aligned:
            started.start(torch._C._cuda_getCurrentRawStream(device), tokens, *places, *strides)
            return
    compiled = launch(
        kv_write_kernel, (tokens,), (k, v, loc, *strides), writer.constexprs, (writer.fixed,),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    if compiled is not None and aligned:
        last = (*writer.fixed.values, *writer.constexprs.values())
        writer.started[known] = Started(compiled, last)


def started_write(
    cache: Cache, heads: Heads, dtype: torch.dtype, strides: tuple[int, ...], device: int
) -> Started | None:
    """How `kv_write` repeats what it launched for aligned tensors of these strides, if it has.

    Its first arguments are the addresses of k, v and loc, and `strides`: of tokens and heads in k and v.
    """
    writer: _Writer | None = cache.memo.get((heads.num_kv, heads.dim, heads.v_dim))
    return None if writer is None else writer.started.get((strides, dtype, dtype, torch.int64, device))


class _Writer:
    """What all writes to one layer have in common."""

    def __init__(self, cache: Cache, num_kv: int, dim: int, v_dim: int) -> None:
        self.fixed = Fixed(
            cache.k, cache.v, cache.k_scale, cache.v_scale, *cache.k_strides, *cache.v_strides,
            *cache.scale_strides, cache.largest,
        )  # fmt: skip
        self.constexprs = {
            "PAGE": cache.page, "HEADS": num_kv, "D": dim, "DV": v_dim,
            "BLOCK_K": power_of_two(num_kv * dim), "BLOCK_V": power_of_two(num_kv * v_dim),
            "SCALED": cache.scaled, "SATURATE": cache.k.dtype.itemsize == 1,
        }  # fmt: skip
        self.started: dict[tuple[Any, ...], Started] = {}
