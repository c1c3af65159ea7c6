"""Materialised steps of any backend: gather latents, expand them, attend ragged, merge exactly.

An adapter supplies one ragged multi-head kernel; prefix chunks, scales, merging and sinks are here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from anyattn.core.call import AttentionCall
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.scales import dequantize
from anyattn.core.mla_keys import KeyPart
from anyattn.core.state import AttentionState
from anyattn.errors import ConfigError

__all__ = ["RaggedAttention", "run_materialised"]


class RaggedAttention(Protocol):
    """Multi-head attention of the step's queries over keys of their own requests."""

    def __call__(
        self,
        call: AttentionCall,
        k: torch.Tensor,
        v: torch.Tensor,
        part: KeyPart,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool,
    ) -> None:
        """Write `out [T, Hq, Dv]` and, unless None, the natural-log `lse [T, Hq]`, sinks not counted.

        `k [n, Hq, nope + rope]`, `v [n, Hq, Dv]`: rows `part.offsets[i] ..` are request i's, possibly none
        (out zero, lse -inf). Causal: key j of a request stands beside its query j; else all are seen.
        """
        ...


def run_materialised(call: AttentionCall, pool: KVPool, ragged: RaggedAttention) -> None:
    """Write `call.out` and `call.lse` of a step whose plan has `mla_keys`.

    Raises:
        ConfigError: a layer without `mla_expand`, or one whose expansion has another shape.
    """
    keys, sinks = call.plan.mla_keys, call.layer.sinks
    assert keys is not None
    if not keys.prefix and sinks is None:
        ragged(call, *_expanded(call, pool, keys.new, new=True), keys.new, call.out, call.lse, causal=True)
        return
    state = _attended(call, pool, keys.new, ragged, new=True)
    for part in keys.prefix:
        state = state.merge(_attended(call, pool, part, ragged, new=False))
    state = state.finalise(sinks)
    call.out.copy_(state.out)
    if call.lse is not None:
        call.lse.copy_(state.lse)


def _attended(
    call: AttentionCall, pool: KVPool, part: KeyPart, ragged: RaggedAttention, *, new: bool
) -> AttentionState:
    """One part as a state in float32, so that merging rounds nothing away."""
    out = torch.empty(call.out.shape, dtype=torch.float32, device=call.out.device)
    lse = torch.empty(call.out.shape[:2], dtype=torch.float32, device=call.out.device)
    ragged(call, *_expanded(call, pool, part, new=new), part, out, lse, causal=new)
    return AttentionState(out, lse)


def _expanded(
    call: AttentionCall, pool: KVPool, part: KeyPart, *, new: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(k [n, Hq, nope + rope], v [n, Hq, Dv])` of one part, in the model's dtype."""
    mla, heads = call.layer.spec.mla, call.layer.spec.num_q_heads
    assert mla is not None
    if call.layer.mla_expand is None:
        raise ConfigError(
            f"layer {call.layer.layer_id} can't run materialised",
            asked="mla_expand None",
            allowed="a function from latents to keys and values",
            hint="AttentionLayer(…, mla_expand=MLAProjections(…)), or MLAPolicy(method=MLAMethod.ABSORBED)",
        )
    rows = _latents(call, pool, part, new=new)
    k_nope, v = call.layer.mla_expand(rows[:, : mla.kv_lora_rank])
    wanted = (heads, mla.qk_nope_head_dim), (heads, mla.v_head_dim)
    if (k_nope.shape[1:], v.shape[1:]) != wanted or k_nope.dtype != rows.dtype:
        raise ConfigError(
            f"mla_expand of layer {call.layer.layer_id}",
            asked=f"{tuple(k_nope.shape)} {k_nope.dtype}, {tuple(v.shape)}",
            allowed=f"[n, {wanted[0]}] and [n, {wanted[1]}] in {rows.dtype}",
        )
    rope = rows[:, None, mla.kv_lora_rank :].expand(-1, heads, -1)
    return torch.cat((k_nope, rope), dim=2), v


def _latents(call: AttentionCall, pool: KVPool, part: KeyPart, *, new: bool) -> torch.Tensor:
    """`[n, rank + rope]` in the model's dtype: as stored, unless this step stores nothing."""
    scale, _ = pool.scales(call.layer.layer_id)
    exact = pool.kv_dtype == call.q.dtype and scale.is_one
    if new and call.k is not None and (exact or not call.stored):
        return call.k[: part.total, 0]
    stored, _ = pool.gather(call.layer.layer_id, part.slots)
    return (stored if exact else dequantize(stored, scale).to(call.q.dtype))[:, 0]
