"""Shapes of one call: flat or per-head inputs become `[T, H, D]` views; nothing is copied."""

from __future__ import annotations

import torch

from anyattn.core.spec import AttentionKind, AttentionSpec
from anyattn.errors import BatchError

__all__ = ["checked_heads", "lse_like", "output_like"]


def _heads(x: torch.Tensor, name: str, tokens: int | None, heads: int, dim: int) -> torch.Tensor:
    """`[T, H * D]` or `[T, H, D]` as `[T, H, D]`, without a copy."""
    if isinstance(x, torch.Tensor) and x.shape == (tokens, heads, dim) and x.stride(2) == 1:
        return x
    if not isinstance(x, torch.Tensor):
        hint = "k and v may both be None, q may not"
        raise BatchError(f"type of {name}", asked=type(x).__name__, allowed="torch.Tensor", hint=hint)
    if x.dim() == 2 and x.shape[1] == heads * dim:
        x = x.view(x.shape[0], heads, dim)
    if x.dim() != 3 or x.shape[1:] != (heads, dim) or (tokens is not None and x.shape[0] != tokens):
        rows = "T" if tokens is None else tokens
        raise BatchError(
            f"shape of {name}",
            asked=tuple(x.shape),
            allowed=f"[{rows}, {heads}, {dim}] or [{rows}, {heads * dim}]",
            hint="T is the batch's token count, the rest the layer's spec",
        )
    if x.stride(2) != 1 and dim > 1:
        raise BatchError(
            f"the last dimension of {name} must be contiguous",
            asked=x.stride(),
            allowed="stride 1",
            hint=f"{name}.contiguous()",
        )
    return x


def checked_heads(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    spec: AttentionSpec,
    tokens: int,
    dtype: torch.dtype,
    q_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """q, k, v as `[T, H, D]` views. `q_dim`: the query's size where it isn't the spec's (expanded latents).

    Raises:
        BatchError: wrong shape or dtype, k without v. Cross-attention keys have the encoder's length.
    """
    if (k is None) != (v is None):
        raise BatchError(
            "k and v come together",
            asked="one of them",
            allowed="both, or None for both",
            hint="None for both reads everything from the pool",
        )
    q3 = _heads(q, "q", tokens, spec.num_q_heads, q_dim or spec.head_dim)
    kv_tokens = None if spec.kind is AttentionKind.CROSS else tokens
    k3 = None if k is None else _heads(k, "k", kv_tokens, spec.num_kv_heads, spec.head_dim)
    v3 = None if v is None else _heads(v, "v", kv_tokens, spec.num_kv_heads, spec.v_head_dim)
    if q3.dtype is dtype and (k3 is None or k3.dtype is dtype) and (v3 is None or v3.dtype is dtype):
        return q3, k3, v3
    name, x = next((n, x) for n, x in (("q", q3), ("k", k3), ("v", v3)) if x is not None and x.dtype != dtype)
    raise BatchError(
        f"dtype of {name}", asked=x.dtype, allowed=dtype, hint="the dtype that select() was asked for"
    )


def output_like(
    q: torch.Tensor, spec: AttentionSpec, out: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out in q's rank, the same memory as [T, Hq, Dv])`.

    Raises:
        BatchError: an `out` of another shape or dtype, or one that can't be viewed per head.
    """
    tokens, heads, dim = q.shape[0], spec.num_q_heads, spec.v_head_dim
    shape = (tokens, heads * dim) if q.dim() == 2 else (tokens, heads, dim)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=q.device)
    elif tuple(out.shape) != shape or out.dtype != dtype:
        raise BatchError(
            "out",
            asked=f"{tuple(out.shape)} {out.dtype}",
            allowed=f"{shape} {dtype}",
            hint="out has q's rank, Dv in place of D, and the model's dtype",
        )
    return out, (out.view(tokens, heads, dim) if out.dim() == 2 else out)


def lse_like(q: torch.Tensor, lse_out: torch.Tensor | None, wanted: bool = True) -> torch.Tensor | None:
    """`lse_out` or fresh memory, float32 `[T, Hq]`; None unless `wanted`.

    Raises:
        BatchError: another shape or dtype, or an `lse_out` that isn't wanted.
    """
    if not wanted:
        if lse_out is not None:
            raise BatchError(
                "lse_out without return_lse",
                asked="return_lse=False",
                allowed="return_lse=True",
                hint="pass return_lse=True, or no lse_out",
            )
        return None
    shape = q.shape[:2]
    if lse_out is None:
        return torch.empty(shape, dtype=torch.float32, device=q.device)
    if lse_out.shape != shape or lse_out.dtype != torch.float32:
        raise BatchError(
            "lse_out",
            asked=f"{tuple(lse_out.shape)} {lse_out.dtype}",
            allowed=f"{tuple(shape)} float32",
            hint="lse_out is token-major: [T, Hq]",
        )
    return lse_out
