"""A llama-architecture decoder in plain torch, with one `anyattn.AttentionLayer` a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import anyattn
from anyattn.core.spec import AttentionSpec
from anyattn.demo.linear import make_linear
from anyattn.demo.weights import Checkpoint, LlamaConfig
from anyattn.errors import ConfigError

__all__ = ["LlamaModel", "Rotary"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Rotary:
    """Half-split ("neox") rotary embedding, computed in float32 (RoFormer, arXiv 2104.09864).

    `tables(positions)` once a step; `apply` once a layer, on query and key heads together.
    """

    def __init__(self, head_dim: int, max_context: int, theta: float, device: torch.device) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        angles = torch.arange(max_context, dtype=torch.float32, device=device)[:, None] / theta**exponent
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], dim=-1)
        self._sin = torch.cat([-sin, sin], dim=-1)  # the sign of rotate-half lives in the table

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin `[T, 1, D]` of positions `[T]`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    @staticmethod
    def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated heads `[T, H, D]` in the dtype of `x`; `x` stays as it is."""
        wide = x.float()
        swapped = wide.view(*wide.shape[:-1], 2, wide.shape[-1] // 2).flip(-2).flatten(-2)
        return torch.addcmul(wide * cos, swapped, sin).to(x.dtype)


class _Layer:
    """Weights and attention of one decoder layer. q, k and v are slices of one fused product."""

    def __init__(self, checkpoint: Checkpoint, index: int, spec: AttentionSpec, like: torch.Tensor) -> None:
        def take(*names: str) -> torch.Tensor:
            parts = [checkpoint.tensors[f"blk.{index}.{name}.weight"] for name in names]
            return torch.cat(parts).to(like)

        self.spec = spec
        self.eps = checkpoint.config.norm_eps
        self.attention_norm, self.ffn_norm = take("attn_norm"), take("ffn_norm")
        self.qkv = make_linear(take("attn_q", "attn_k", "attn_v"))
        self.out = make_linear(take("attn_output"))
        self.gate_up = make_linear(take("ffn_gate", "ffn_up"))
        self.down = make_linear(take("ffn_down"))
        self.attention = anyattn.AttentionLayer(spec, layer_id=index)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: anyattn.ForwardBatch
    ) -> torch.Tensor:
        """Residual stream `[T, hidden]` through this layer."""
        spec, tokens = self.spec, x.shape[0]
        rotated = spec.num_q_heads + spec.num_kv_heads
        qkv = self.qkv(F.rms_norm(x, x.shape[-1:], self.attention_norm, self.eps))
        heads = qkv.view(tokens, rotated + spec.num_kv_heads, spec.head_dim)
        qk = Rotary.apply(heads[:, :rotated], cos, sin)
        q, k, v = qk[:, : spec.num_q_heads], qk[:, spec.num_q_heads :], heads[:, rotated:]
        attended = self.attention(q, k, v, batch)
        x = x + self.out(attended.flatten(1))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.ffn_norm, self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LlamaModel:
    """The decoder. Call it inside `anyattn.forward_context`.

    Args:
        checkpoint: dequantised weights; its tensors may be dropped afterwards.
        dtype: float32, bfloat16 or float16.
        device: where weights live and steps run.
        max_context: longest sequence, for the rotary tables (default: the checkpoint's).

    Attributes:
        specs: one `AttentionSpec` a layer.

    Raises:
        ConfigError: another dtype, or a context longer than the model was trained for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_context: int | None = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise ConfigError("dtype of the demo model", asked=dtype, allowed=", ".join(map(str, _DTYPES)))
        config = checkpoint.config
        self.max_context = max_context or config.max_context
        if self.max_context > config.max_context:
            raise ConfigError("context of the demo model", asked=max_context, allowed=config.max_context)
        self.config: LlamaConfig = config
        self.device = torch.device(device)
        like = torch.empty(0, dtype=dtype, device=self.device)
        self.dtype = dtype
        self.specs = (_spec(config),) * config.num_layers
        self.embedding = checkpoint.tensors["token_embd.weight"].to(like)
        head = checkpoint.tensors.get("output.weight")
        self.head = make_linear(self.embedding if head is None else head.to(like))
        self.norm = checkpoint.tensors["output_norm.weight"].to(like)
        self.rotary = Rotary(config.head_dim, self.max_context, config.rope_theta, self.device)
        self.layers = [_Layer(checkpoint, i, spec, like) for i, spec in enumerate(self.specs)]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: anyattn.ForwardBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of chosen tokens.

        Args:
            token_ids, positions: int64 `[T]` on the model's device.
            batch: the step that the active plan was made for.
            rows: int64 `[N]`, which of the T tokens are sampled from.

        Returns:
            float32 `[N, vocab]`.
        """
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self.rotary.tables(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, batch)
        last = F.rms_norm(x[rows], x.shape[-1:], self.norm, self.config.norm_eps)
        return self.head(last).float()


def _spec(config: LlamaConfig) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=config.num_q_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
