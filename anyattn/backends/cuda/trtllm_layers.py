"""What `trtllm_mha` keeps: the constants of each layer, and memory that kernels expect to find zeroed.

From flashinfer 0.7.2: `decode.py`, `prefill.py`, `csrc/xqa/mha.cu`, `csrc/trtllm_fmha_kernel_launcher.cu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.scales import KVScale
from anyattn.core.layer import AttentionLayer

__all__ = ["LN2", "Layer", "Memory", "chain_mask", "dense_rows", "new_layer"]

LN2 = math.log(2.0)
_WORKSPACE_BYTES = 128 << 20
_SCRATCH_BYTES = 64 << 20
"""Left for partial results behind the softmax statistics of a context kernel that returns the LSE."""
_MANY_DRAFTS = 256  # of a request: more is no number that anybody drafts
_MOST_SMS = 1024
"""More than any GPU has: counters are as many as SMs, or as requests times heads."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Constants of a layer.

    Attributes:
        cache: K and V as the pool lays them out.
        bmm1, bmm2: what the kernel multiplies logits and outputs by.
        k_heads, v_heads: scales that differ between KV heads, per query head `[1, Hq, 1]`; None where they
            are one number. `v_scale`: a number that the kernel leaves out.
        sinks: float32 `[Hq]`.
        rounded: dtype that queries are rounded to, None for the model's: trtllm-gen reads 8-bit KV with 8-bit
            queries.
    """

    layer: AttentionLayer
    cache: tuple[torch.Tensor, torch.Tensor]
    bmm1: float
    bmm2: float
    window_left: int
    k_heads: torch.Tensor | None
    v_heads: torch.Tensor | None
    v_scale: float
    sinks: torch.Tensor | None
    rounded: torch.dtype | None

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """`q` times the K scale of its head, where heads differ, and rounded where it must be."""
        if self.k_heads is not None:
            q = (q * self.k_heads).to(q.dtype)
        if self.rounded is not None:
            most = torch.finfo(self.rounded).max
            q = q.clamp(-most, most).to(self.rounded)
        return q

    def finish(self, made: torch.Tensor, out: torch.Tensor) -> None:
        """`made` into `out`, with the V scales that the kernel doesn't know."""
        if self.v_heads is not None:
            made.mul_(self.v_heads)
        elif self.v_scale != 1.0:
            made.mul_(self.v_scale)
        if made is not out:
            out.copy_(made)


def new_layer(layer: AttentionLayer, pool: MHAPool, *, xqa: bool) -> Layer:
    """Constants of a layer. `xqa`: it has one scale for K and V, and reads it where KV has 8 bits."""
    spec = layer.spec
    k, v = pool.scales(layer.layer_id)
    k_number, v_number = _number(k), _number(v)
    in_kernel = not xqa or is_fp8(pool.kv_dtype)
    return Layer(
        layer=layer,
        cache=(pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id)),
        bmm1=spec.scale * k_number,
        bmm2=v_number if in_kernel else 1.0,
        window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
        k_heads=_per_head(k, spec.group_size),
        v_heads=_per_head(v, spec.group_size),
        v_scale=1.0 if in_kernel else v_number,
        sinks=None if layer.sinks is None else layer.sinks.float().contiguous(),
        rounded=pool.kv_dtype if is_fp8(pool.kv_dtype) and not xqa else None,
    )


def _number(scale: KVScale) -> float:
    """The one scale of all heads; 1 where they differ."""
    return scale.host[0] if len(set(scale.host)) == 1 else 1.0


def _per_head(scale: KVScale, group_size: int) -> torch.Tensor | None:
    if len(set(scale.host)) == 1:
        return None
    return scale.device.repeat_interleave(group_size)[None, :, None]


def dense_rows(out: torch.Tensor) -> torch.Tensor:
    """`out` itself, or memory of its shape without gaps: kernels write through the pointer alone."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def chain_mask(query_offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Bits of the draft tokens that each one sees: those before it and itself.

    `query_offsets int32 [B + 1]`; `out int16 [T, words]`, 16 bits a word, the lowest first.
    """
    token = torch.arange(out.shape[0], device=out.device, dtype=torch.int32)
    row = torch.searchsorted(query_offsets[1:], token, right=True).clamp_max_(query_offsets.shape[0] - 2)
    seen = token - query_offsets[row] + 1
    word = torch.arange(out.shape[1], device=out.device, dtype=torch.int32)
    bits = (seen[:, None] - 16 * word[None, :]).clamp(0, 16)
    out.copy_((torch.bitwise_left_shift(torch.ones_like(bits), bits) - 1).to(torch.int16))


class Memory:
    """Workspace and counters of one backend on one stream: zeroed once, reset by the kernels themselves.

    Attributes:
        workspace: XQA's semaphores (the first 8 MiB) and scratch; trtllm-gen's statistics and scratch.
        counters: of trtllm-gen's splits, a request and head each.
    """

    def __init__(self, config: BackendConfig, device: torch.device) -> None:
        limits = config.limits
        self._device, self._limits = device, limits
        self._heads = max(config.groups.max_q_heads.values())
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.counters = self._new_counters(limits.max_requests + 1)
        self._held: dict[str, torch.Tensor] = {}

    def hold(self) -> None:
        """From here on masks and sums of steps have addresses of their own."""
        self._held.clear()

    def cover(self, num_requests: int, max_q_len: int, *, stable: bool) -> None:
        """Room for a step of that shape. What a graph has seen stays where it is: limits sized it."""
        if not stable and num_requests * self._heads > self.counters.numel():
            self.counters = self._new_counters(num_requests)
        statistics = 8 * self._heads * num_requests * (-(-max_q_len // 256) * 256)
        if not stable and statistics + _SCRATCH_BYTES > self.workspace.numel():
            size = statistics + _SCRATCH_BYTES
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)

    def offsets(self, index: int, num_requests: int, *, stable: bool) -> torch.Tensor:
        """int32 `[B + 1]` that begins with 0."""
        size = max(num_requests, self._limits.max_requests) + 1
        return self._take(f"offsets.{index}", size, (num_requests + 1,), torch.int32, stable=stable)

    def drafts(self, max_q_len: int) -> int:
        """Tokens of a request that XQA is started for in a step: what a process may verify, since a kernel is
        compiled for that number. Who doesn't say may verify all the context, and gets a power of two.

        Two at least: the kernel for one is that of decode, which takes no request without any and may round
        queries.
        """
        most = self._limits.max_draft_tokens
        return max(2, most if most <= _MANY_DRAFTS else 1 << (max_q_len - 1).bit_length())

    def chain(self, num_tokens: int, drafts: int, *, stable: bool) -> torch.Tensor:
        """uint16 words of XQA's mask as int16 `[T, words]`: rows are padded to 32 bits."""
        words = -(-drafts // 32) * 2
        rows = max(num_tokens, self._limits.max_requests * drafts)
        return self._take("chain", rows * words, (num_tokens, words), torch.int16, stable=stable)

    def _take(
        self, name: str, size: int, shape: tuple[int, ...], dtype: torch.dtype, *, stable: bool
    ) -> torch.Tensor:
        if not stable:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.zeros(size, dtype=dtype, device=self._device)
        return held[: math.prod(shape)].view(shape)

    def _new_counters(self, num_requests: int) -> torch.Tensor:
        count = max(num_requests * self._heads, _MOST_SMS)
        return torch.zeros(-(-count // 8) * 8, dtype=torch.int32, device=self._device)
