"""What a model asks of attention: one `AttentionSpec` a layer, and the `Limits` of the serving process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from anyattn.errors import ConfigError

__all__ = ["AttentionKind", "AttentionSpec", "Limits", "MLASpec"]


class AttentionKind(Enum):
    """Which keys a query may see. ENCODER_ONLY attends within the step and caches nothing."""

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Both shapes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Absorbed: query-key size `kv_lora_rank + qk_rope_head_dim`, value size `kv_lora_rank`, one KV head.
    Materialised: `qk_nope_head_dim + qk_rope_head_dim` and `v_head_dim` for every query head.
    """

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer, in heads of *this rank*.

    Args:
        num_q_heads, num_kv_heads: Hq is a multiple of Hkv.
        head_dim: D, the query-key size. `v_head_dim`: Dv, default D.
        scale: softmax scale, default 1/sqrt(D). Must be explicit for MLA.
        sliding_window: W keys, the query's own position included (bidirectional: |p - k| < W).
        logit_cap: c in c * tanh(logits / c).
        sinks: the layer carries one sink logit per query head.
        kv_shared_with: layer number whose KV this layer reads instead of its own.

    Raises:
        ConfigError: sizes that can't be.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    scale: float = 0.0
    sliding_window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    kind: AttentionKind = AttentionKind.CAUSAL
    mla: MLASpec | None = None
    kv_shared_with: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"AttentionSpec.{name}", asked=getattr(self, name), allowed=">= 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                "query heads must be a multiple of KV heads",
                asked=f"{self.num_q_heads} / {self.num_kv_heads}",
                hint="give the head counts of one rank, after tensor-parallel sharding",
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError("sliding_window counts keys", asked=self.sliding_window, allowed="None or >= 1")
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise ConfigError("logit_cap", asked=self.logit_cap, allowed="None or > 0")
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.scale == 0.0:
            if self.mla is not None:
                raise ConfigError("MLA needs an explicit scale", hint="scale=1/sqrt(nope + rope head size)")
            object.__setattr__(self, "scale", 1.0 / math.sqrt(self.head_dim))
        if self.v_head_dim < 1 or not math.isfinite(self.scale):
            raise ConfigError(
                "v_head_dim / scale", asked=(self.v_head_dim, self.scale), allowed="> 0, finite"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class Limits:
    """Bounds that every buffer is sized by: requests and query tokens of a step, KV tokens of a request."""

    max_requests: int
    max_tokens: int
    max_context: int
    max_draft_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("max_requests", 1),
            ("max_tokens", 1),
            ("max_context", 1),
            ("max_draft_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"Limits.{name}", asked=getattr(self, name), allowed=f">= {least}")
