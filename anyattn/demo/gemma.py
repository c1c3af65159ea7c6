"""Gemma-3 in plain torch, with one `anyattn.AttentionLayer` a layer: windows on five layers of six."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import anyattn
from anyattn.core.spec import AttentionSpec
from anyattn.demo.gemma_weights import GemmaCheckpoint, GemmaConfig
from anyattn.demo.linear import make_linear
from anyattn.demo.model import Rotary
from anyattn.errors import ConfigError

__all__ = ["GemmaModel"]

_Tables = tuple[torch.Tensor, torch.Tensor]


class _Layer:
    """Weights and attention of one decoder layer; norms stand before and after each half."""

    def __init__(
        self, checkpoint: GemmaCheckpoint, index: int, spec: AttentionSpec, like: torch.Tensor
    ) -> None:
        def take(*names: str) -> torch.Tensor:
            parts = [checkpoint.tensors[f"blk.{index}.{name}.weight"] for name in names]
            return torch.cat(parts).to(like)

        self.spec, self.eps = spec, checkpoint.config.norm_eps
        self.before, self.after = take("attn_norm"), take("post_attention_norm")
        self.ffn_before, self.ffn_after = take("ffn_norm"), take("post_ffw_norm")
        self.q_norm, self.k_norm = take("attn_q_norm"), take("attn_k_norm")
        self.qkv = make_linear(take("attn_q", "attn_k", "attn_v"))
        self.out = make_linear(take("attn_output"))
        self.gate_up = make_linear(take("ffn_gate", "ffn_up"))
        self.down = make_linear(take("ffn_down"))
        self.attention = anyattn.AttentionLayer(spec, layer_id=index)

    def __call__(self, x: torch.Tensor, tables: _Tables, batch: anyattn.ForwardBatch) -> torch.Tensor:
        """Residual stream `[T, hidden]` through this layer; `tables`: its rotary cos and sin."""
        spec = self.spec
        rotated = spec.num_q_heads + spec.num_kv_heads
        every = rotated + spec.num_kv_heads
        heads = self.qkv(self._norm(x, self.before)).view(x.shape[0], every, spec.head_dim)
        q, k, v = heads[:, : spec.num_q_heads], heads[:, spec.num_q_heads : rotated], heads[:, rotated:]
        q = Rotary.apply(self._norm(q, self.q_norm), *tables)
        k = Rotary.apply(self._norm(k, self.k_norm), *tables)
        attended = self.attention(q, k, v, batch)
        x = x + self._norm(self.out(attended.flatten(1)), self.after)
        gate, up = self.gate_up(self._norm(x, self.ffn_before)).chunk(2, dim=-1)
        return x + self._norm(self.down(F.gelu(gate, approximate="tanh") * up), self.ffn_after)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class GemmaModel:
    """The decoder. Call it inside `anyattn.forward_context`; serve it with `anyattn.demo.engine.Engine`.

    Args:
        checkpoint: dequantised weights; its tensors may be dropped afterwards.
        dtype, device: of weights and steps.
        max_context: longest sequence, for the rotary tables (default: the checkpoint's).

    Attributes:
        specs: one `AttentionSpec` a layer.

    Raises:
        ConfigError: a context longer than the model was trained for.
    """

    def __init__(
        self,
        checkpoint: GemmaCheckpoint,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_context: int | None = None,
    ) -> None:
        config = checkpoint.config
        self.max_context = config.max_context if max_context is None else max_context
        if not 1 <= self.max_context <= config.max_context:
            raise ConfigError(
                "context of the demo model", asked=max_context, allowed=f"1 .. {config.max_context}"
            )
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        like = torch.empty(0, dtype=dtype, device=self.device)
        self.specs = tuple(_spec(config, layer) for layer in range(config.num_layers))
        self.embedding = checkpoint.tensors["token_embd.weight"].to(like)
        # On the device from the start: a step that is captured copies nothing from the host.
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype, device=self.device)
        self.head = make_linear(self.embedding)
        self.norm = checkpoint.tensors["output_norm.weight"].to(like)
        self._rotary = {
            theta: Rotary(config.head_dim, self.max_context, theta, self.device)
            for theta in (config.rope_theta, config.local_rope_theta)
        }
        self.layers = [_Layer(checkpoint, i, spec, like) for i, spec in enumerate(self.specs)]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: anyattn.ForwardBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of chosen tokens: see `LlamaModel.forward`."""
        config = self.config
        x = F.embedding(token_ids, self.embedding)
        x = x * self._scale
        full = self._rotary[config.rope_theta].tables(positions)
        local = self._rotary[config.local_rope_theta].tables(positions)
        for layer in self.layers:
            x = layer(x, full if layer.spec.sliding_window is None else local, batch)
        last = F.rms_norm(x[rows], x.shape[-1:], self.norm, config.norm_eps)
        return self.head(last).float()


def _spec(config: GemmaConfig, layer: int) -> AttentionSpec:
    return AttentionSpec(
        num_q_heads=config.num_q_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        sliding_window=config.window_of(layer),
    )
