"""What every attention stand-in computes in the end: the softmax of one request, in float64, over keys that
a table names. Conventions (masks, bases, axes) stay with the stand-ins.
"""

from __future__ import annotations

import itertools
import math
import zlib

import torch

__all__ = ["attend", "band", "check", "fingerprint", "gather", "offsets"]


def check(holds: bool, text: str) -> None:
    """What a compiled library does with arguments that it refuses.

    Raises:
        RuntimeError: it doesn't hold.
    """
    if not holds:
        raise RuntimeError(text)


def offsets(indptr: torch.Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each request from cumulative offsets `[B + 1]`."""
    ends = [int(n) for n in indptr.tolist()]
    return list(itertools.pairwise(ends))


def band(rows: int, keys: int, left: int, right: int, *, last: int | None = None) -> torch.Tensor:
    """Bool `[rows, keys]`: row i stands at position `last - rows + 1 + i` (default: the last row at the last
    key) and sees keys from `left` before it to `right` behind it; -1 is no bound.
    """
    end = keys - 1 if last is None else last
    gap = torch.arange(end - rows + 1, end + 1)[:, None] - torch.arange(keys)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= gap <= left
    if right >= 0:
        seen &= gap >= -right
    return seen


def gather(cache: torch.Tensor, table: torch.Tensor, stop: int) -> torch.Tensor:
    """Keys 0 .. `stop` - 1 of one request, `[stop, ...]`, from `cache [N, P, ...]` and its row of pages.

    Raises:
        RuntimeError: a page that isn't in the pool, or a table too narrow: on a device an illegal access.
    """
    page_size = cache.shape[1]
    positions = torch.arange(stop)
    needed = -(-stop // page_size)
    pages = table[:needed].to(torch.int64).cpu()
    inside = needed <= table.shape[0] and bool(((pages >= 0) & (pages < cache.shape[0])).all())
    check(inside, f"illegal memory access: {stop} keys in pages {pages.tolist()} of {cache.shape[0]}")
    return cache[pages[positions // page_size], positions % page_size]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, *, scale: float | torch.Tensor,
    cap: float = 0.0, sinks: torch.Tensor | None = None, poisoned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one request in float64.

    Args:
        q: `[n, Hq, D]`; k: `[m, Hkv, D]`; v: `[m, Hkv, Dv]`, KV heads shared by consecutive query heads.
        seen: bool `[n, m]`. scale: of q.k, one number or `[Hq]`. cap: `cap * tanh(s / cap)`; 0 is none.
        sinks: logits without values, `[Hq]`, or `[n, Hq]` where rows have their own.
        poisoned: weights of 0 still multiply V, as where a kernel loads whole tiles: NaN in a row of V that
            nobody sees comes out.

    Returns:
        out `[n, Hq, Dv]` and the natural-log LSE `[n, Hq]`, sinks included; without keys 0 and the sink
        (or -inf).
    """
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    rows, heads, group = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    if not poisoned:
        v = torch.where(seen.any(0)[:, None, None], v, 0.0)
    shared = q.reshape(rows, k.shape[1], group, q.shape[2])
    logits = torch.einsum("nkgd,mkd->kgnm", shared, k).reshape(heads, rows, k.shape[0])
    logits = logits * torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1, 1)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(logits, dim=2)
    if sinks is not None:
        own = sinks.to(torch.float64)
        lse = torch.logaddexp(lse, own[:, None] if own.ndim == 1 else own.T)
    weights = torch.exp(logits - torch.where(torch.isneginf(lse), 0.0, lse)[:, :, None])
    out = torch.einsum("kgnm,mkd->nkgd", weights.view(k.shape[1], group, rows, k.shape[0]), v)
    return out.reshape(rows, heads, v.shape[2]), lse.T


def fingerprint(*values: object) -> int:
    """31 bits that differ where the values do; tensors count by what they hold."""
    plain = [v.tolist() if isinstance(v, torch.Tensor) else v for v in values]
    return zlib.crc32(repr(plain).encode()) & 0x7FFFFFFF
