"""Layouts of fused infer attention's queries, keys and outputs, and what its lengths mean in each.

TND: tokens of all requests, lengths of queries cumulative without a leading 0, their last the number of
tokens; lengths of KV likewise, but per request over pages. Others: one length a request, or one for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyattn.testing.emulators.softmax import check

__all__ = ["LAYOUTS", "Shape", "from_tokens", "lengths_of", "shape_of", "to_tokens"]

Tensor = torch.Tensor
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "TND_NTD")


@dataclass(frozen=True)
class Shape:
    """Of the queries: batch and longest of one request (0 and 0 for TND), all tokens, heads, head size."""

    layout: str
    batch: int
    longest: int
    tokens: int
    heads: int
    dim: int

    def out(self, dim: int) -> tuple[int, ...]:
        """The output's shape, with values of `dim`."""
        if self.layout == "TND":
            return self.tokens, self.heads, dim
        if self.layout == "TND_NTD":
            return self.heads, self.tokens, dim
        if self.layout == "BSH":
            return self.batch, self.longest, self.heads * dim
        if self.layout == "BNSD":
            return self.batch, self.heads, self.longest, dim
        return self.batch, self.longest, self.heads, dim

    def lse(self) -> tuple[int, ...]:
        """`[T, N, 1]`, elsewhere `[B, N, S, 1]`."""
        if self.layout.startswith("TND"):
            return self.tokens, self.heads, 1
        return self.batch, self.heads, self.longest, 1

    def lse_of(self, rows: Tensor) -> Tensor:
        """From `[T, N]`."""
        if self.layout.startswith("TND"):
            return rows.unsqueeze(2)
        return rows.reshape(self.batch, self.longest, self.heads).transpose(1, 2).unsqueeze(3)

    def starts(self, q_lens: Sequence[int]) -> list[int]:
        """First token of each request, in `[T, N, D]`."""
        if self.layout.startswith("TND"):
            return [0, *itertools.accumulate(q_lens)][:-1]
        return [i * self.longest for i in range(self.batch)]

    def split_keys(self, layout: str, x: Tensor, heads: int, lengths: Sequence[int]) -> list[Tensor]:
        """Keys without pages, one `[n, Hkv, D]` a request."""
        if layout.startswith("TND"):
            check(x.dim() == 3 and x.shape[1] == heads, f"key {list(x.shape)} isn't [T, {heads}, D]")
            return list(torch.split(x[: sum(lengths)], list(lengths)))
        rows = to_tokens(layout, x, heads).reshape(self.batch, -1, heads, _dim(layout, x, heads))
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]


def _dim(layout: str, x: Tensor, heads: int) -> int:
    check(layout != "BSH" or x.shape[2] % heads == 0, f"H {x.shape[-1]} isn't a multiple of {heads} heads")
    return x.shape[2] // heads if layout == "BSH" else x.shape[-1]


def shape_of(layout: str, query: Tensor, heads: int) -> Shape:
    """Raises `RuntimeError` where rank or number of heads don't fit the layout."""
    tnd = layout.startswith("TND")
    rank = 3 if tnd or layout == "BSH" else 4
    check(query.dim() == rank, f"query {list(query.shape)} isn't {layout}")
    if tnd:
        check(query.shape[1] == heads, f"num_heads {heads} isn't the query's N {query.shape[1]}")
        return Shape(layout, 0, 0, query.shape[0], heads, query.shape[2])
    if layout == "BSH":
        batch, longest = query.shape[:2]
        return Shape(layout, batch, longest, batch * longest, heads, _dim(layout, query, heads))
    heads_at = 2 if layout == "BSND" else 1
    check(query.shape[heads_at] == heads, f"num_heads {heads} isn't the query's N {query.shape[heads_at]}")
    batch, longest = query.shape[0], query.shape[3 - heads_at]
    check(layout != "BNSD_BSND" or longest > 1, "BNSD_BSND needs Q_S above 1")
    return Shape(layout, batch, longest, batch * longest, heads, query.shape[3])


def to_tokens(layout: str, x: Tensor, heads: int) -> Tensor:
    """`[T, N, D]`; padded rows included where the layout has them."""
    if layout.startswith("TND"):
        return x
    if layout in ("BSH", "BSND"):
        return x.reshape(x.shape[0] * x.shape[1], heads, -1)
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], heads, -1)


def from_tokens(layout: str, rows: Tensor, shape: Shape) -> Tensor:
    """Back to the output's layout from `[T, N, Dv]`."""
    if layout == "TND_NTD":
        return rows.transpose(0, 1)
    if layout == "BNSD":
        return rows.reshape(shape.batch, shape.longest, shape.heads, -1).transpose(1, 2)
    return rows.reshape(shape.out(rows.shape[2]))


def lengths_of(
    shape: Shape, q_lens: Sequence[int] | None, kv_lens: Sequence[int] | None, key: Tensor, *, paged: bool
) -> tuple[list[int], list[int]]:
    """Queries and keys of each request.

    Raises:
        RuntimeError: lists that are missing, negative, falling or of another number.
    """
    if shape.layout.startswith("TND"):
        check(q_lens is not None, "with TND actual_seq_lengths must be given")
        check(kv_lens is not None, "with TND actual_seq_lengths_kv must be given")
        assert q_lens is not None
        assert kv_lens is not None
        rows = _differences(q_lens)
        last = q_lens[-1] if q_lens else 0
        check(last == shape.tokens, f"561002: the last of actual_seq_lengths is {last}, T is {shape.tokens}")
        check(len(kv_lens) == len(rows), f"{len(kv_lens)} lengths of KV for {len(rows)} of queries")
        keys = list(kv_lens) if paged else _differences(kv_lens)
        check(min(keys, default=0) >= 0, "negative lengths")
        check(paged or sum(keys) <= key.shape[0], f"{sum(keys)} keys in a key of {key.shape[0]}")
        return rows, keys
    longest = [shape.longest] * shape.batch
    rows = longest if shape.longest == 1 else _each(q_lens, longest)
    axis = 2 if shape.layout.startswith("BNSD") else 1
    keys = _each(kv_lens, [0 if paged else key.shape[axis]] * shape.batch, bounded=not paged)
    return rows, keys


def _differences(ends: Sequence[int]) -> list[int]:
    found = [b - a for a, b in itertools.pairwise([0, *ends])]
    check(min(found, default=0) >= 0, f"cumulative lengths must not fall: {list(ends)}")
    return found


def _each(given: Sequence[int] | None, whole: list[int], *, bounded: bool = True) -> list[int]:
    """One a request: one for all, or the first of at least as many."""
    if given is None:
        return whole
    if len(given) == 1:
        given = [given[0]] * len(whole)
    check(len(given) >= len(whole), f"{len(given)} lengths for {len(whole)} requests")
    found = [int(n) for n in given[: len(whole)]]
    fits = all(n >= 0 and (not bounded or n <= most) for n, most in zip(found, whole, strict=True))
    check(fits, f"lengths {found} outside of {whole}")
    return found
