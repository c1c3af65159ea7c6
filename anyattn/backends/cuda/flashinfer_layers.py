"""What `flashinfer` knows of a layer: its cache, and scales as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.core.kv.scales import KVScale
from anyattn.core.layer import AttentionLayer

__all__ = ["Layer", "number", "per_head"]


@dataclass(slots=True, eq=False)
class Layer:
    """What is constant of a layer. Scales are None where they are 1; `*_heads [1, Hq, 1]`: per head.

    `plain`: no scales and no sinks.
    """

    layer: AttentionLayer
    slot: int
    cache: tuple[torch.Tensor, torch.Tensor]
    k_scale: float | None
    v_scale: float | None
    k_heads: torch.Tensor | None
    v_heads: torch.Tensor | None
    sinks: torch.Tensor | None
    plain: bool = False

    def __post_init__(self) -> None:
        scales = (self.k_scale, self.v_scale, self.k_heads, self.v_heads)
        self.plain = self.sinks is None and all(scale is None for scale in scales)


def number(scale: KVScale) -> float | None:
    """One scale for all heads; None where it is 1, or differs from head to head."""
    return None if scale.is_one or len(set(scale.host)) > 1 else scale.host[0]


def per_head(scale: KVScale, group_size: int) -> torch.Tensor | None:
    """Scales that differ from KV head to KV head, for every query head `[1, Hq, 1]`."""
    if len(set(scale.host)) == 1:
        return None
    return scale.device.repeat_interleave(group_size)[None, :, None]
