"""The judge: paged attention in float64, from plain arguments, sharing no code with what it judges.

It reads `req_to_token` rows itself and is given the K and V that *should* stand in every slot. Written to
be read next to the definition, one request, one head and one visibility question at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["KINDS", "OracleRequest", "attend", "is_visible", "read_slots", "relative_error", "stored_values"]

KINDS = ("causal", "bidirectional", "encoder_only", "cross")


@dataclass(frozen=True, kw_only=True)
class OracleRequest:
    """One request of a step, as raw facts.

    Attributes:
        slots: the slots of every key that the request has, in key order (this step's tokens last; for
            cross-attention the encoder's).
        num_queries: query tokens of this step (0 is legal).
        positions: token positions of the queries, default `prefix .. prefix + num_queries - 1`.
        mask: bool `[num_queries, len(slots)]`, True = visible; replaces the causal rule, not the window.
        is_padding: a row that stands for nobody: its outputs are zero and its LSE -inf.
    """

    slots: Sequence[int]
    num_queries: int
    positions: Sequence[int] | None = None
    mask: torch.Tensor | None = None
    is_padding: bool = False

    @property
    def prefix(self) -> int:
        """Keys that were there before this step (meaningless for cross-attention)."""
        return len(self.slots) - self.num_queries


def read_slots(req_to_token: torch.Tensor, row: int, length: int) -> list[int]:
    """The first `length` slots of one row of a raw token table `[R, max_context]`."""
    if length > req_to_token.shape[1]:
        raise ValueError(f"{length} tokens in a table of width {req_to_token.shape[1]}")
    return [int(slot) for slot in req_to_token[row, :length].tolist()]


def is_visible(request: OracleRequest, query: int, key: int, *, kind: str, window: int | None) -> bool:
    """Does query token `query` of the step see key index `key`?

    Causal: keys up to its own. Window W: `p - W < k <= p` causal, `|p - k| < W` otherwise, in token
    positions; a cached key's position is its index, a new one's is the position it was given.
    """
    if kind == "cross":
        return True
    own_index = request.prefix + query
    if request.mask is not None:
        if not bool(request.mask[query, key]):
            return False
    elif kind == "causal" and key > own_index:
        return False
    if window is None:
        return True
    distance = _position(request, own_index) - _position(request, key)
    return distance < window if kind == "causal" else abs(distance) < window


def _position(request: OracleRequest, index: int) -> int:
    if request.positions is None or index < request.prefix:
        return index
    return int(request.positions[index - request.prefix])


def _visibility(request: OracleRequest, kind: str, window: int | None) -> torch.Tensor:
    rows = [
        [is_visible(request, query, key, kind=kind, window=window) for key in range(len(request.slots))]
        for query in range(request.num_queries)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(request.num_queries, len(request.slots))


def _softmax_rows(
    logits: torch.Tensor, values: torch.Tensor, sink: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the keys and the sink (-inf: none), which takes weight and adds no value."""
    with_sink = torch.cat([logits, torch.full((logits.shape[0], 1), sink, dtype=torch.float64)], dim=1)
    lse = torch.logsumexp(with_sink, dim=1)
    weights = torch.exp(logits - lse[:, None])
    weights = torch.where(torch.isneginf(logits), 0.0, weights)
    return weights @ values, lse


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    requests: Sequence[OracleRequest],
    *,
    scale: float,
    kind: str = "causal",
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one step, float64.

    logits = cap(scale * q.k), then the mask, then softmax over the visible keys and the head's sink.

    Args:
        query: `[T, Hq, D]`, requests one after another; rows behind the last request are padding.
        keys, values: `[S, Hkv, D]` and `[S, Hkv, Dv]` by slot: what should be stored, as read back.
        requests: one per request, in query order.
        scale, logit_cap: logits are `c * tanh(scale * q.k / c)`.
        sinks: `[Hq]`, one logit per query head, or None.

    Returns:
        out `[T, Hq, Dv]` (zero for a query without keys and for padding) and the natural-log LSE
        `[T, Hq]`, the sink included (without keys: the sink, or -inf).

    Raises:
        ValueError: sizes that disagree, an unknown kind, a window for cross-attention.
    """
    if kind not in KINDS or (kind == "cross" and window is not None):
        raise ValueError(f"kind {kind!r} with window {window}; kinds are {KINDS}")
    tokens, q_heads, _ = query.shape
    if sum(r.num_queries for r in requests) > tokens or q_heads % keys.shape[1]:
        raise ValueError("more queries than rows, or query heads that don't share the KV heads evenly")
    q, k_all, v_all = (x.to(torch.float64) for x in (query, keys, values))
    out = torch.zeros(tokens, q_heads, values.shape[2], dtype=torch.float64)
    lse = torch.full((tokens, q_heads), -math.inf, dtype=torch.float64)
    start = 0
    for request in requests:
        stop = start + request.num_queries
        if not request.is_padding:
            seen = _visibility(request, kind, window)
            slots = torch.tensor(list(request.slots), dtype=torch.int64)
            for head in range(q_heads):
                kv_head = head // (q_heads // keys.shape[1])
                logits = scale * (q[start:stop, head] @ k_all[slots, kv_head].T)
                if logit_cap is not None:
                    logits = logit_cap * torch.tanh(logits / logit_cap)
                logits = torch.where(seen, logits, -math.inf)
                sink = -math.inf if sinks is None else float(sinks[head])
                out[start:stop, head], lse[start:stop, head] = _softmax_rows(
                    logits, v_all[slots, kv_head], sink
                )
        start = stop
    return out, lse


def stored_values(x: torch.Tensor, dtype: torch.dtype, scale: float | Sequence[float] = 1.0) -> torch.Tensor:
    """What reading `x [n, Hkv, size]` back gives, float64: `sat(x / scale)` as stored, times `scale`.

    The scale is one number or one per KV head, rounded to float32 as is the division; a storage dtype of
    one byte saturates, others are a plain conversion.
    """
    factors = torch.tensor([scale] if isinstance(scale, (int, float)) else list(scale), dtype=torch.float32)
    scaled = x.to(torch.float32) / factors[:, None]
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        scaled = scaled.clamp(-limit, limit)
    return scaled.to(dtype).to(torch.float64) * factors[:, None].to(torch.float64)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """max |difference| / max(`floor`, max |expected|); infinite where one is finite and the other isn't.

    Equal infinities agree (an LSE of -inf). Where every expected value is zero the difference counts as
    it is. Nothing to compare is no error.
    """
    actual, expected = actual.detach().to("cpu", torch.float64), expected.to("cpu", torch.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    infinite = torch.isinf(expected)
    if not torch.equal(actual[infinite], expected[infinite]) or not bool(
        torch.isfinite(actual[~infinite]).all()
    ):
        return math.inf
    finite = expected[~infinite]
    if finite.numel() == 0:
        return 0.0
    largest = max(floor, float(finite.abs().max()))
    return float((actual[~infinite] - finite).abs().max()) / (largest or 1.0)
