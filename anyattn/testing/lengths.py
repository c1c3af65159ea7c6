"""Lengths of the requests of a case, next to the edges that kernels get wrong."""

from __future__ import annotations

import random

__all__ = ["LENGTHS", "draw_lengths"]

LENGTHS = ("page", "window", "fresh", "long_query", "split", "short", "any")
"""`page`: totals around page multiples. `window`: totals of W - 1, W, W + 1 and far beyond. `fresh`: no
prefix, more new tokens than the window. `long_query`: a prefix and more new tokens than the window.
`split`: totals around tile and split edges. `short`: 0 and 1 tokens. `any`: uniform."""

_SPLITS = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)


def draw_lengths(
    rng: random.Random, kind: str, mode: str, count: int, page: int, window: int | None, limit: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """`(prefix lengths, extend lengths, decode rows)` of `count` requests, `limit` KV tokens at most.

    `kind` is one of `LENGTHS`, `mode` that of the case.
    """
    edge = window or 2 * page
    extend = [_new_tokens(rng, kind, mode, edge, limit) for _ in range(count)]
    if not any(extend):
        extend[0] = 1  # a step without tokens proves nothing
    num_decode = rng.randint(1, count) if mode == "mixed" else 0
    if num_decode:
        extend[-num_decode:] = [1] * num_decode
    prefix = []
    for new in extend:
        total = _total(rng, kind, new, page, window, limit)
        prefix.append(max(0, min(limit, total) - new))
    return tuple(prefix), tuple(extend), num_decode


def _new_tokens(rng: random.Random, kind: str, mode: str, edge: int, limit: int) -> int:
    if mode == "decode":
        return 1
    if mode in ("verify", "draft_extend"):
        return rng.randint(1, 6)
    most = max(1, min(limit, 40))
    if kind in ("fresh", "long_query"):
        return min(most, edge + rng.randint(1, 9))
    if kind == "short":
        return rng.choice((0, 1, 1, 2))
    return rng.randint(1, min(most, 24))


def _total(rng: random.Random, kind: str, new: int, page: int, window: int | None, limit: int) -> int:
    """KV tokens of one request, this step's included."""
    if kind == "fresh":
        return new
    if kind == "short":
        return new + rng.choice((0, 0, 1))
    near: list[int] = []
    if kind == "page":
        near = [n * page + d for n in range(1, 5) for d in (-1, 0, 1)]
    elif kind == "window" and window is not None:
        near = [window - 1, window, window + 1, window + new, 3 * window + page]
    elif kind == "split":
        near = list(_SPLITS)
    fitting = [n for n in near if new <= n <= limit]
    return rng.choice(fitting) if fitting else new + rng.randint(0, max(0, limit - new))
