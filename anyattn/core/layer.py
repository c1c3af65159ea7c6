"""`AttentionLayer`: the attention of one model layer, as model code calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anyattn.core.arguments import check_instance, check_whole
from anyattn.core.call import LayerInputs
from anyattn.core.context import active_context, current_context
from anyattn.core.groups import PlanGroup
from anyattn.core.mla import MLAExpand, out_size
from anyattn.core.ops import attention, register_layer
from anyattn.core.spec import AttentionSpec
from anyattn.errors import ConfigError

if TYPE_CHECKING:
    from anyattn.core.batch import ForwardBatch

__all__ = ["AttentionLayer"]


class AttentionLayer(nn.Module):
    """Attention of one layer; takes backend and plan from the forward context.

    Attributes:
        spec: what this layer asks for. layer_id: its number in the pool.
        plan_group: fixed at creation. key: process-wide integer for compiled code.
        sinks: `[Hq]` sink logits where `spec.sinks`.
        mla_expand: takes latents to keys and values of every head; materialised steps need it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer_id: int,
        sinks: torch.Tensor | None = None,
        *,
        mla_expand: MLAExpand | None = None,
    ) -> None:
        """Raises `ConfigError` if `sinks` disagrees with the spec."""
        super().__init__()
        check_instance("spec of a layer", spec, AttentionSpec, "anyattn.AttentionSpec(...)")
        check_whole("layer_id", layer_id, 0, hint="layers are numbered as their specs in select()")
        if spec.sinks != (sinks is not None) or (sinks is not None and sinks.shape != (spec.num_q_heads,)):
            raise ConfigError(
                f"sinks of layer {layer_id}",
                asked="None" if sinks is None else list(sinks.shape),
                allowed=f"a tensor [{spec.num_q_heads}]"
                if spec.sinks
                else "None, or AttentionSpec(sinks=True)",
                hint="AttentionSpec(sinks=True) goes with one sink logit per query head",
            )
        self.spec, self.layer_id = spec, layer_id
        self.plan_group = PlanGroup.of(spec)
        self.key = register_layer(self)
        self.sinks: torch.Tensor | None
        self.register_buffer("sinks", sinks, persistent=False)
        self.mla_expand = mla_expand

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Attention of this step.

        Args:
            q: `[T, Hq, D]` or `[T, Hq * D]`; the output has its rank. May be a strided slice.
            k, v: `[T, Hkv, D]` / `[T, Hkv, Dv]`, flat or not; both None = read everything from the pool.
                MLA: k is `[T, 1, rank + rope]` (or `[T, 1, rank]` with `inputs.k_rope`), v None; q and the
                output have the sizes of `plan.mla_method`.
            save_kv_cache: store k and v. False = attend to them without storing them.
            return_lse: also return the natural-log LSE, float32 `[T, Hq]`, sinks included.
            out, lse_out: written and returned instead of fresh tensors.

        Returns:
            `out`, or `(out, lse)`; sparse layers append their index output.

        Raises:
            ContextError: no forward context. PlanError: another batch's plan, too many heads.
            FeatureError: something that the backend doesn't declare. BatchError: shapes or dtypes.
        """
        if torch.compiler.is_compiling():
            return self._compiled(q, k, v, save_kv_cache, return_lse, out, lse_out, inputs)
        context = active_context() or current_context()
        result = context.backend.forward(
            q, k, v, self, batch,
            save_kv_cache=save_kv_cache, return_lse=return_lse, out=out, lse_out=lse_out, inputs=inputs,
            plan=context.plan,
        )  # fmt: skip
        if result.lse is None and result.idx_out is None:
            return result.out
        return (result.out, *(x for x in (result.lse, result.idx_out) if x is not None))

    def _compiled(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        save_kv_cache: bool,
        return_lse: bool,
        out: torch.Tensor | None,
        lse_out: torch.Tensor | None,
        inputs: LayerInputs | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The same through one opaque op, so that a whole model compiles without a graph break."""
        if inputs is not None:
            raise ConfigError("LayerInputs under torch.compile", hint="call the layer eagerly")
        flat = q.dim() == 2
        heads, tokens = self.spec.num_q_heads, q.shape[0]
        v_dim = out_size(self.spec, q.shape[1] // heads if flat else q.shape[2])
        if out is None:
            shape = (tokens, heads * v_dim) if flat else (tokens, heads, v_dim)
            out = q.new_empty(shape)
        if return_lse and lse_out is None:
            lse_out = q.new_empty((tokens, heads), dtype=torch.float32)
        attention(q, k, v, out, lse_out if return_lse else None, self.key, save_kv_cache)
        if not return_lse:
            return out
        assert lse_out is not None
        return out, lse_out

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        s = self.spec
        return f"layer_id={self.layer_id}, heads={s.num_q_heads}/{s.num_kv_heads}, D={s.head_dim}"
