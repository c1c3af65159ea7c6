"""What the `aiter` kernels keep of a layer, and the memory that they scribble in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.scales import KVScale
from anyattn.core.layer import AttentionLayer

__all__ = ["Layer", "Scratch", "dense_heads", "dense_rows", "new_layer"]


@dataclass(frozen=True, eq=False)
class Layer:
    """Constants of a layer.

    Attributes:
        k, v: the cache as the kernel takes it. cap: 0.0 = none. window: W keys, None = all.
        k_scale, v_scale: float32 `[1]`, what the kernel multiplies stored values by.
        k_heads, v_heads: scales that differ between KV heads, per query head `[1, Hq, 1]`: AITER's kernels
            know one number, so queries and outputs carry them. None where one number says all.
    """

    layer: AttentionLayer
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    cap: float
    window: int | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_heads: torch.Tensor | None
    v_heads: torch.Tensor | None

    @property
    def sides(self) -> tuple[int, int]:
        """`(left, right)` of a causal window, as flash kernels count: keys beside the query's own."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """`q` times the K scale of its head, where heads differ."""
        return q if self.k_heads is None else (q * self.k_heads).to(q.dtype)

    def finish(self, made: torch.Tensor, out: torch.Tensor) -> None:
        """`made` into `out`, with the V scales of its heads."""
        if self.v_heads is not None:
            made = made * self.v_heads
        if made is not out:
            out.copy_(made)


def new_layer(layer: AttentionLayer, pool: MHAPool, page: int) -> Layer:
    """Constants of a layer whose kernel reads pages of `page` tokens; a token-major pool splits by a view."""
    k, v = pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id)
    if pool.layout == "NHD":
        k, v = k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:])
    (k_scale, k_heads), (v_scale, v_heads) = (
        _split_scale(scale, layer.spec.group_size) for scale in pool.scales(layer.layer_id)
    )
    spec = layer.spec
    return Layer(
        layer=layer, k=k, v=v, scale=spec.scale, cap=spec.logit_cap or 0.0, window=spec.sliding_window,
        k_scale=k_scale, v_scale=v_scale, k_heads=k_heads, v_heads=v_heads,
    )  # fmt: skip


def _split_scale(scale: KVScale, group_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`(one number for the kernel, one for each query head or None)`."""
    if len(set(scale.host)) == 1:
        return scale.device[:1], None
    heads = scale.device.repeat_interleave(group_size)[None, :, None]
    return torch.ones_like(scale.device[:1]), heads


def dense_rows(out: torch.Tensor) -> torch.Tensor:
    """`out` itself, or memory of its shape without gaps: HIP kernels write through the pointer alone."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def dense_heads(q: torch.Tensor) -> torch.Tensor:
    """`q [T, Hq, D]` whose heads lie side by side: HIP kernels know the stride of tokens alone."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


class Scratch:
    """Uninitialised memory that one call at a time writes and reads, on one stream.

    Eager steps share one buffer, which grows. What a graph has recorded is never replaced.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager = torch.empty(0, dtype=torch.uint8, device=device)
        self._recorded: list[torch.Tensor] = []

    def take(self, nbytes: int, *, stable: bool) -> torch.Tensor:
        """uint8 `[>= nbytes]`; `stable`: for a plan that a graph may record."""
        if not stable:
            if self._eager.numel() < nbytes:
                self._eager = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            return self._eager
        for kept in self._recorded:
            if kept.numel() >= nbytes:
                return kept
        self._recorded.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
        return self._recorded[-1]
