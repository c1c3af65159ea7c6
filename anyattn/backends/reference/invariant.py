"""Batch-invariant attention of one request: the same bits alone, batched and in chunks of any size.

What breaks invariance in a fused kernel is that its blocking follows the shape: other queries or keys in a
step change the order in which one query's sums are taken. Here every product has one shape, and every query
and key one place in it: queries stand in blocks of 16, keys in tiles of 64, both anchored at multiples of
their *sequence index*, padded with zeros, and tiles are folded into the running softmax in ascending order
(FlashAttention-2, arXiv 2307.08691, algorithm 1). A tile that a query doesn't see leaves its state as it is.
Equal shapes in equally aligned memory take the same path through the matrix library, so equal inputs give
equal bits, on one machine with one number of threads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anyattn.backends.reference.attend import _fold, _no_keys, _unfold
from anyattn.core.spec import AttentionSpec

__all__ = ["attend_invariant"]

_QUERIES, _KEYS = 16, 64


def attend_invariant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    seen: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    first_query: int,
    first_key: int,
) -> None:
    """As `attend`; `first_query`, `first_key`: sequence indices of `q[0]` and `k[0]`."""
    num_keys, length = k.shape[0], q.shape[0]
    if num_keys == 0 or length == 0:
        _no_keys(out, lse, sinks)
        return
    k, v, before = _tiles(k, first_key), _tiles(v, first_key), first_key % _KEYS
    base = first_query // _QUERIES * _QUERIES
    for start in range(base, first_query + length, _QUERIES):
        low, high = max(start, first_query), min(start + _QUERIES, first_query + length)
        given, placed = slice(low - first_query, high - first_query), slice(low - start, high - start)
        block = q.new_zeros(_QUERIES, *q.shape[1:])
        block[placed] = q[given]
        cells = torch.zeros(_QUERIES, k.shape[0] * _KEYS, dtype=torch.bool, device=q.device)
        cells[placed, before : before + num_keys] = True if seen is None else seen[given]
        value, natural = _attend_block(block, k, v, spec, cells, sinks)
        out[given] = value[placed].to(out.dtype)
        if lse is not None:
            lse[given] = natural[placed]


def _tiles(x: torch.Tensor, first_key: int) -> torch.Tensor:
    """`[Lk, H, size]` -> `[tiles, 64, H, size]`: key index i at place i % 64 of its tile, zeros elsewhere."""
    before = first_key % _KEYS
    behind = -(before + x.shape[0]) % _KEYS
    return F.pad(x, (0, 0, 0, 0, before, behind)).view(-1, _KEYS, *x.shape[1:])


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`q [16, Hq, D]` over all tiles -> `(out [16, Hq, Dv], lse [16, Hq])`, sinks included."""
    rows = _fold(q, k.shape[2])
    top = rows.new_full(rows.shape[:2], -torch.inf)
    total, acc = torch.zeros_like(top), rows.new_zeros(*rows.shape[:2], v.shape[3])
    for index in range(k.shape[0]):
        cells = seen[:, index * _KEYS : (index + 1) * _KEYS].contiguous()
        if not bool(cells.any()):
            continue
        scores = torch.matmul(rows, k[index].permute(1, 2, 0)).mul_(spec.scale)
        if spec.logit_cap is not None:
            scores.div_(spec.logit_cap).tanh_().mul_(spec.logit_cap)
        scores.masked_fill_(~cells.repeat(spec.group_size, 1), -torch.inf)
        highest = torch.maximum(top, scores.amax(-1))
        safe = torch.where(torch.isneginf(highest), torch.zeros_like(highest), highest)
        kept = torch.where(highest == top, torch.ones_like(top), torch.exp(top - safe))
        weights = torch.exp(scores.sub_(safe[..., None]))
        total = total * kept + weights.sum(-1)
        acc = acc * kept[..., None] + torch.matmul(weights, v[index].transpose(0, 1))
        top = highest
    empty = total == 0
    value = _unfold(acc / torch.where(empty, torch.ones_like(total), total)[..., None], _QUERIES)
    natural = _unfold((top + torch.log(total))[..., None], _QUERIES)[..., 0]
    if sinks is not None:
        value = value * torch.sigmoid(natural - sinks)[..., None]
        natural = torch.logaddexp(natural, sinks.expand_as(natural))
    return value + 0.0, natural  # a tile that a row doesn't see may turn -0 into 0: always 0
