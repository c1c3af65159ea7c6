"""The projections of a latent layer, and a module that serves every method of a plan with them."""

from __future__ import annotations

import torch
from torch import nn

from anyattn.core.batch import ForwardBatch
from anyattn.core.call import LayerInputs
from anyattn.core.context import current_context
from anyattn.core.layer import AttentionLayer
from anyattn.core.spec import AttentionSpec
from anyattn.errors import ConfigError

__all__ = ["MLAAttention", "MLAProjections"]


class MLAProjections(nn.Module):
    """`w_k [Hq, nope, rank]` and `w_v [Hq, v_head_dim, rank]`: what takes a latent to keys and values.

    Called, it expands (`layer.mla_expand`); `absorb` and `project` are its transposes for absorbed steps.
    """

    def __init__(self, w_k: torch.Tensor, w_v: torch.Tensor) -> None:
        """Raises `ConfigError` for weights of different heads or ranks."""
        super().__init__()
        if w_k.dim() != 3 or w_v.dim() != 3 or (w_k.shape[0], w_k.shape[2]) != (w_v.shape[0], w_v.shape[2]):
            raise ConfigError(
                "weights of an MLA expansion",
                asked=f"{tuple(w_k.shape)} and {tuple(w_v.shape)}",
                allowed="[Hq, nope, rank] and [Hq, v_head_dim, rank]",
                hint="MLAProjections.from_kv_b_proj splits a checkpoint's matrix",
            )
        self.w_k: torch.Tensor
        self.w_v: torch.Tensor
        self.register_buffer("w_k", w_k, persistent=False)
        self.register_buffer("w_v", w_v, persistent=False)

    @staticmethod
    def from_kv_b_proj(weight: torch.Tensor, spec: AttentionSpec) -> MLAProjections:
        """From DeepSeek's `kv_b_proj.weight [Hq * (nope + v_head_dim), rank]` (k first in every head).

        Raises:
            ConfigError: a matrix of another shape.
        """
        mla = spec.mla
        if mla is None or weight.shape != (
            spec.num_q_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            mla.kv_lora_rank,
        ):
            raise ConfigError(
                "kv_b_proj.weight",
                asked=tuple(weight.shape),
                allowed="[Hq * (nope + v_head_dim), rank] of an MLA spec, heads of this rank",
            )
        heads = weight.view(spec.num_q_heads, -1, mla.kv_lora_rank)
        return MLAProjections(heads[:, : mla.qk_nope_head_dim], heads[:, mla.qk_nope_head_dim :])

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`latent [n, rank] -> (k_nope [n, Hq, nope], v [n, Hq, v_head_dim])`."""
        return self._expand(latent, self.w_k), self._expand(latent, self.w_v)

    @staticmethod
    def _expand(latent: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads, size, rank = weight.shape
        return (latent @ weight.reshape(heads * size, rank).T).view(-1, heads, size)

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """`q_nope [T, Hq, nope] -> [T, Hq, rank]`."""
        return torch.einsum("thn,hnr->thr", q_nope, self.w_k)

    def project(self, out: torch.Tensor) -> torch.Tensor:
        """Latent output `[T, Hq, rank] -> [T, Hq, v_head_dim]`."""
        return torch.einsum("thr,hvr->thv", out, self.w_v)


class MLAAttention(nn.Module):
    """A latent layer as model code wants it: queries and outputs per head, whatever the plan's method.

    Attributes:
        attention: the `AttentionLayer`, whose `mla_expand` is `projections`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer_id: int,
        projections: MLAProjections,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Raises `ConfigError` for a spec without MLA."""
        super().__init__()
        self.projections = projections
        self.attention = AttentionLayer(spec, layer_id, sinks, mla_expand=projections)

    def forward(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """`q_nope [T, Hq, nope]`, `q_rope [T, Hq, rope]`, `latent [T, 1, rank + rope]` (normalised latent,
        then the rotated key) -> `[T, Hq, v_head_dim]`.
        """
        method = current_context().plan.mla_method
        if method is not None and method.expands:
            out = self.attention(q_nope, latent, None, batch, inputs=LayerInputs(q_rope=q_rope))
        else:
            absorbed = self.projections.absorb(q_nope)
            out = self.attention(absorbed, latent, None, batch, inputs=LayerInputs(q_rope=q_rope))
            out = self.projections.project(out)
        assert isinstance(out, torch.Tensor)
        return out
