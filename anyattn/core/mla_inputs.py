"""Tensors of a latent call, given whole or with their rope parts apart, brought to one form."""

from __future__ import annotations

import torch

from anyattn.core.call import LayerInputs
from anyattn.core.mla import MLAMethod, materialised_spec
from anyattn.core.spec import AttentionSpec
from anyattn.errors import BatchError

__all__ = ["WholeCall", "as_whole"]

WholeCall = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, AttentionSpec]


def as_whole(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    spec: AttentionSpec,
    method: MLAMethod | None,
    inputs: LayerInputs | None,
) -> WholeCall:
    """`(q, k, v, spec of q and out)`; layers without MLA pass through as they are.

    For MLA k becomes `[T, 1, rank + rope]` and v its first `rank` columns, a view. q is `[T, Hq, D]` of the
    method: `rank + rope` absorbed, `nope + rope` materialised. A copy is made only of what was given apart.

    Raises:
        BatchError: a v besides the latent, a q of the other method, rope parts that don't fit.
    """
    if spec.mla is None:
        return q, k, v, spec
    if v is not None:
        raise BatchError(
            "v of an MLA layer",
            asked=tuple(v.shape),
            allowed="None",
            hint="values are the latent part of k: pass k and no v",
        )
    shape = materialised_spec(spec) if method is not None and method.expands else spec
    rope = spec.mla.qk_rope_head_dim
    q_rope, k_rope = (None, None) if inputs is None else (inputs.q_rope, inputs.k_rope)
    if q_rope is not None:
        q = _joined(q, q_rope, spec.num_q_heads, shape.head_dim - rope, rope, "q")
    _check_method(q, spec, shape, method)
    if k_rope is not None:
        if k is None:
            raise BatchError("k_rope without k", asked="k_rope alone", allowed="k and k_rope, or neither")
        k = _joined(k, k_rope, 1, spec.head_dim - rope, rope, "k")
    if k is not None and k.shape[-1] == spec.head_dim:
        k = k.view(k.shape[0], 1, spec.head_dim)
        v = k[..., : spec.v_head_dim]
    else:
        v = k
    return q, k, v, shape


def _joined(
    x: torch.Tensor, rope: torch.Tensor, heads: int, size: int, rope_size: int, name: str
) -> torch.Tensor:
    """`[T, H, size]` and `[T, H, rope]` side by side, in x's rank."""
    tokens = x.shape[0]
    fits = (
        x.dtype == rope.dtype
        and tokens == rope.shape[0]
        and x.shape[1:] in ((heads, size), (heads * size,))
        and rope.shape[1:] in ((heads, rope_size), (heads * rope_size,))
    )
    if not fits:
        raise BatchError(
            f"{name} and {name}_rope",
            asked=f"{tuple(x.shape)} {x.dtype} and {tuple(rope.shape)} {rope.dtype}",
            allowed=f"[T, {heads}, {size}] and [T, {heads}, {rope_size}], one dtype",
            hint=f"leave {name}_rope out where {name} is whole",
        )
    whole = torch.cat((x.view(tokens, heads, size), rope.view(tokens, heads, rope_size)), dim=2)
    return whole.view(tokens, heads * (size + rope_size)) if x.dim() == 2 else whole


def _check_method(
    q: torch.Tensor, spec: AttentionSpec, shape: AttentionSpec, method: MLAMethod | None
) -> None:
    """A query of the other method's size says that the model didn't read the plan."""
    other = materialised_spec(spec) if shape is spec else spec
    size = q.shape[-1] if q.dim() == 3 else q.shape[-1] // spec.num_q_heads
    if size != shape.head_dim and size == other.head_dim:
        name = "absorbed" if method is None else method.value
        raise BatchError(
            f"this step runs {name}, and q has the size of the other method",
            asked=size,
            allowed=shape.head_dim,
            hint="read plan.mla_method (MLAAttention does), or fix it with MLAPolicy(method=…)",
        )
