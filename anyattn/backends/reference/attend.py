"""Dense attention of one request in float32: every feature, one place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anyattn.core.rows import aligned
from anyattn.core.spec import AttentionKind, AttentionSpec

__all__ = ["attend", "visible"]

_MAX_SCORES = 1 << 26  # score elements held at once: queries are processed in blocks beyond that


def visible(
    spec: AttentionSpec, q_pos: torch.Tensor, k_pos: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Bool `[Lq, Lk]`: which keys each query sees, or None for all of them.

    Causal: k <= p. Window W: p - W < k (bidirectional: |p - k| < W). An explicit mask replaces the
    causal rule; the window stays, in positions.
    """
    gap = q_pos[:, None] - k_pos[None, :]
    seen = mask
    if spec.kind is AttentionKind.CAUSAL and mask is None and q_pos.shape[0] > 1:
        seen = gap >= 0
    window = spec.sliding_window
    if window is not None:
        inside = gap < window
        if spec.kind is not AttentionKind.CAUSAL:
            inside &= gap > -window
        seen = inside if seen is None else seen & inside
    return seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    seen: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    empty_rows: bool,
) -> None:
    """`q [Lq, Hq, D]`, `k [Lk, Hkv, D]`, `v [Lk, Hkv, Dv]` (float32) -> `out [Lq, Hq, Dv]`, `lse [Lq, Hq]`.

    The query heads of a KV head are folded into rows, so GQA costs one matrix product per KV head.
    `empty_rows`: some query may see no key at all.
    """
    if k.shape[0] == 0 or q.shape[0] == 0:
        _no_keys(out, lse, sinks)
        return
    if lse is None and sinks is None and spec.logit_cap is None and not empty_rows:
        _fused(q, k, v, spec, seen, out)
        return
    step = max(1, _MAX_SCORES // (q.shape[1] * k.shape[0]))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        block = None if seen is None else seen[rows]
        _explicit(q[rows], k, v, spec, block, out[rows], None if lse is None else lse[rows], sinks)


def _no_keys(out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.copy_(sinks.expand_as(lse)) if sinks is not None else lse.fill_(-torch.inf)


def _fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[Lq, Hkv * G, D]` -> `[Hkv, G * Lq, D]`."""
    length, heads, dim = q.shape
    return q.view(length, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _unfold(x: torch.Tensor, length: int) -> torch.Tensor:
    """`[Hkv, G * Lq, Dv]` -> `[Lq, Hkv * G, Dv]`."""
    kv_heads, rows, dim = x.shape
    return x.view(kv_heads, rows // length, length, dim).permute(2, 0, 1, 3).reshape(length, -1, dim)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, seen: torch.Tensor | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """torch's own fused attention, where it can say what is asked."""
    kv_heads, group = k.shape[1], spec.group_size
    rows = _fused_rows(_fold(q, kv_heads))[None]
    mask = None if seen is None else seen.repeat(group, 1)[None, None]
    keys, values = _fused_rows(k).transpose(0, 1)[None], _fused_rows(v).transpose(0, 1)[None]
    result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=spec.scale)
    out.copy_(_unfold(result[0], q.shape[0]))


def _fused_rows(x: torch.Tensor) -> torch.Tensor:
    """torch's fused kernels on a GPU read rows of 16 bytes unasked: others raise a misaligned address."""
    return x if x.device.type == "cpu" else aligned(x)


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, seen: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Scores in full: logit cap, sinks, LSE and rows that see nothing."""
    length, kv_heads = q.shape[0], k.shape[1]
    scores = torch.matmul(_fold(q, kv_heads), k.permute(1, 2, 0)).mul_(spec.scale)
    if spec.logit_cap is not None:
        scores.div_(spec.logit_cap).tanh_().mul_(spec.logit_cap)
    if seen is not None:
        scores.masked_fill_(~seen.repeat(spec.group_size, 1), -torch.inf)
    total = torch.logsumexp(scores, -1)
    safe = torch.where(torch.isneginf(total), torch.zeros_like(total), total)
    result = torch.matmul(scores.sub_(safe[..., None]).exp_(), v.transpose(0, 1))
    value, natural = _unfold(result, length), _unfold(total[..., None], length)[..., 0]
    if sinks is not None:
        value = value * torch.sigmoid(natural - sinks)[..., None]
        natural = torch.logaddexp(natural, sinks.expand_as(natural))
    out.copy_(value)
    if lse is not None:
        lse.copy_(natural)
