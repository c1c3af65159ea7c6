"""The driver's two kernels. There is no Lumen: they compute with torch on the CPU; the adapters can't tell.

Yours calls into a compiled library here. What matters is the style: tensors in, results written to `out`, no
knowledge of anyattn, and launches that a graph can record.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from anyattn.core.graph.recorder import record_call

__all__ = ["paged_attention", "stream_decode"]

Tensors = tuple[torch.Tensor, ...]


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, query_offsets: torch.Tensor,
    block_table: torch.Tensor, kv_lens: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, *,
    scale: float,
) -> None:  # fmt: skip
    """Causal attention of ragged queries over paged KV.

    q, out `[T, Hq, D]`; caches `[pages, 16, Hkv, D]`; query_offsets int32 `[B + 1]`; block_table int32
    `[B, width]`; kv_lens int32 `[B]` count the step's own tokens; lse float32 `[T, Hq]` in base 2, as the
    hardware's exponential is.
    """

    def kernel(*given: torch.Tensor) -> None:
        q, k_cache, v_cache, offsets, table, lens, out, *lse = given
        starts = offsets.tolist()
        for row, length in enumerate(lens.tolist()):
            queries = slice(starts[row], starts[row + 1])
            if queries.start == queries.stop:
                continue
            pages = table[row, : math.ceil(length / k_cache.shape[1])].long()
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            count = queries.stop - queries.start
            last = torch.arange(length - count, length)
            hidden = torch.arange(length)[None, :] > last[:, None]
            _attend(q[queries], k, v, hidden, scale, None, out[queries], lse[0][queries] if lse else None)

    _launch(kernel, (q, k_cache, v_cache, query_offsets, block_table, kv_lens, out), lse, "paged_attention")


def stream_decode(
    q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor, indptr: torch.Tensor,
    indices: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, *, scale: float, cap: float | None,
) -> None:  # fmt: skip
    """One query a request over listed slots: q, out `[B, Hq, D]`; slots `[S, Hkv, D]`; lse in base 2."""

    def kernel(*given: torch.Tensor) -> None:
        q, k_slots, v_slots, indptr, indices, out, *lse = given
        bounds = indptr.tolist()
        for row in range(q.shape[0]):
            slots = indices[bounds[row] : bounds[row + 1]].long()
            one = slice(row, row + 1)
            hidden = torch.zeros(1, len(slots), dtype=torch.bool)
            _attend(
                q[one],
                k_slots[slots],
                v_slots[slots],
                hidden,
                scale,
                cap,
                out[one],
                lse[0][one] if lse else None,
            )

    _launch(kernel, (q, k_slots, v_slots, indptr, indices, out), lse, "stream_decode")


def _launch(kernel: Callable[..., None], tensors: Tensors, lse: torch.Tensor | None, name: str) -> None:
    """Hand the kernel to the device: at once, or into the graph that is being captured."""
    record_call(kernel, tensors if lse is None else (*tensors, lse), f"lumen.{name}")


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float,
    cap: float | None, out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """`q [n, Hq, D]`, `k, v [m, Hkv, D]`, hidden bool `[n, m]`; accumulates in float32."""
    if k.shape[0] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    total = torch.logsumexp(scores, -1)
    out.copy_(torch.einsum("hnm,mhd->nhd", torch.exp(scores - total[..., None]), values))
    if lse is not None:
        lse.copy_(total.T * math.log2(math.e))
