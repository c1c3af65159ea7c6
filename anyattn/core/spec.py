"""What a model asks of attention: one `AttentionSpec` a layer, and the `Limits` of the serving process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from anyattn.core.arguments import check_instance, check_number, check_whole
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
            check_whole(f"AttentionSpec.{name}", getattr(self, name), 1)
        self._check_options()
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                "query heads must be a multiple of KV heads",
                asked=f"{self.num_q_heads} / {self.num_kv_heads}",
                allowed=f"{self.num_kv_heads}, {2 * self.num_kv_heads}, {3 * self.num_kv_heads}, …",
                hint="give the head counts of one rank, after tensor-parallel sharding",
            )
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.scale == 0.0:
            if self.mla is not None:
                raise ConfigError(
                    "MLA needs an explicit scale",
                    asked="scale=0.0",
                    allowed="a number",
                    hint="scale=1/sqrt(nope + rope head size)",
                )
            object.__setattr__(self, "scale", 1.0 / math.sqrt(self.head_dim))

    def _check_options(self) -> None:
        """Types and ranges of everything but the head counts."""
        check_whole("AttentionSpec.v_head_dim", self.v_head_dim, 0, hint="0 stands for head_dim")
        check_number("AttentionSpec.scale", self.scale, hint="leave it out for 1/sqrt(head_dim)")
        if self.sliding_window is not None:
            check_whole("sliding_window counts keys", self.sliding_window, 1, hint="None for no window")
        if self.logit_cap is not None:
            check_number("logit_cap", self.logit_cap, positive=True, hint="None for no cap")
        if self.kv_shared_with is not None:
            check_whole("kv_shared_with is a layer number", self.kv_shared_with, 0)
        if self.mla is not None:
            check_instance("AttentionSpec.mla", self.mla, MLASpec, "mla=anyattn.MLASpec(...)")
        check_instance("AttentionSpec.kind", self.kind, AttentionKind, "kind=anyattn.AttentionKind.CAUSAL")
        check_instance("AttentionSpec.sinks", self.sinks, bool, "the tensor goes to AttentionLayer(sinks=)")

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
            check_whole(f"Limits.{name}", getattr(self, name), least)
