"""KV scales and saturating quantisation: stored = sat(x / scale), read = stored * scale, each once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from anyattn.core.dtypes import is_fp8
from anyattn.errors import PoolError

__all__ = ["KVScale", "dequantize", "quantize"]


@dataclass(frozen=True, eq=False)
class KVScale:
    """A scale as kernels take it: on the host and on the device, per tensor or per KV head.

    `host` has one entry or Hkv entries; `device` is float32 of the same length.
    """

    host: tuple[float, ...]
    device: torch.Tensor
    granularity: Literal["tensor", "head"]

    @staticmethod
    def of(
        value: float | Sequence[float] | torch.Tensor, num_kv_heads: int, device: torch.device | str
    ) -> KVScale:
        """From one number (per tensor) or Hkv numbers (per head), plain or as a checkpoint's tensor.

        Raises:
            PoolError: a scale that is zero, negative, infinite or NaN; a wrong count.
        """
        if isinstance(value, torch.Tensor):
            value = value.item() if value.numel() == 1 else value.flatten().tolist()
        per_head = not isinstance(value, (int, float))
        values = tuple(float(x) for x in value) if per_head else (float(value),)  # type: ignore[union-attr, arg-type]
        if per_head and len(values) != num_kv_heads:
            raise PoolError(
                "scales per KV head",
                asked=len(values),
                allowed=num_kv_heads,
                hint="one number for the tensor, or one per KV head of this rank",
            )
        if not all(math.isfinite(x) and x > 0 for x in values):
            raise PoolError(
                "KV scale", asked=values, allowed="finite and > 0", hint="1.0 where the checkpoint has none"
            )
        tensor = torch.tensor(values, dtype=torch.float32, device=device)
        return KVScale(values, tensor, "head" if per_head else "tensor")

    @staticmethod
    def pair(
        k: float | Sequence[float] | torch.Tensor,
        v: float | Sequence[float] | torch.Tensor,
        num_kv_heads: int,
        device: torch.device | str,
    ) -> tuple[KVScale, KVScale]:
        """`of` both, side by side on the device, each from a multiple of 16 bytes on.

        A kernel reads V's behind all keys, and waits for it unless it came with K's: 0.15 us of a short
        decode's 6.1 on an H200.

        Raises:
            PoolError: as `of`.
        """
        made = KVScale.of(k, num_kv_heads, "cpu"), KVScale.of(v, num_kv_heads, "cpu")
        second = -(-len(made[0].host) // 4) * 4
        both = torch.ones(second + len(made[1].host), dtype=torch.float32, device="cpu")
        places = slice(0, len(made[0].host)), slice(second, None)
        for place, scale in zip(places, made, strict=True):
            both[place] = scale.device
        both = both.to(device)
        first, last = (replace(scale, device=both[place]) for place, scale in zip(places, made, strict=True))
        return first, last

    @property
    def is_one(self) -> bool:
        """True if applying it would change nothing."""
        return all(x == 1.0 for x in self.host)

    def column(self) -> torch.Tensor:
        """`[1 or Hkv, 1]`, broadcastable over `[..., Hkv, D]`."""
        return self.device[:, None]


def quantize(x: torch.Tensor, scale: KVScale, dtype: torch.dtype) -> torch.Tensor:
    """`sat(x / scale)` in `dtype`; `x [T, Hkv, D]` itself is never modified.

    A plain cast to e4m3fnuz or e4m3fn turns out-of-range values into NaN, so 8-bit targets are clamped
    to the largest finite value first. NaN stays NaN.
    """
    if scale.is_one and (x.dtype == dtype or not is_fp8(dtype)):
        return x.to(dtype)
    scaled = x.float() if scale.is_one else x.float() / scale.column()
    if is_fp8(dtype):
        limit = torch.finfo(dtype).max
        scaled = scaled.clamp(-limit, limit)
    return scaled.to(dtype)


def dequantize(stored: torch.Tensor, scale: KVScale) -> torch.Tensor:
    """`stored * scale` as float32; no copy where nothing changes."""
    wide = stored.float()
    return wide if scale.is_one else wide * scale.column()
