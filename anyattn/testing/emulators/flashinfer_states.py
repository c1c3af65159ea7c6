"""Stand-ins for FlashInfer's merges and cache writes (0.7.2.post1: `cascade.py`, `page.py`)."""

from __future__ import annotations

import torch

from anyattn.testing.emulators.flashinfer_common import (
    check_layout,
    check_like,
    kv_lengths,
    token_major,
    unpack_cache,
)
from anyattn.testing.emulators.softmax import check

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]

_HALVES = (torch.float16, torch.bfloat16)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states `v [T, H, D]`, `s [T, H]` in base 2."""
    _check_states(v_a, s_a.to(torch.float32), v_b, s_b.to(torch.float32))
    v, s = _merged(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))
    return v.to(v_a.dtype), s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge into `v` and, if it is float32, `s`; rows whose `mask` is 0 stay."""
    wide, wide_other = s.to(torch.float32), s_other.to(torch.float32)  # another dtype: a copy is changed
    _check_states(v, wide, v_other, wide_other)
    merged, sums = _merged(torch.stack((v, v_other), 1), torch.stack((wide, wide_other), 1))
    rows = torch.ones(v.shape[0], dtype=torch.bool) if mask is None else mask.to(torch.bool)
    v[rows] = merged.to(v.dtype)[rows]
    wide[rows] = sums[rows]


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`v [T, n, H, D]`, `s [T, n, H]` in base 2."""
    check(v.is_contiguous() and s.is_contiguous(), "v and s must be contiguous")
    check(v.dtype in _HALVES, "MergeStates kernel launch failed: unsupported data type.")
    merged, sums = _merged(v, s.to(torch.float32))
    return merged.to(v.dtype), sums


def _check_states(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    for name, x in (("v", v), ("s", s), ("v_other", v_other), ("s_other", s_other)):
        check(x.is_contiguous(), f"{name} must be contiguous")
    check(v.ndim == 3 and s.ndim == 2, "v must be 3-D and s 2-D")
    check(v.shape == v_other.shape and s.shape == s_other.shape, "states of different shapes")
    check(v.shape[:2] == s.shape, "v and s disagree")
    check(v.dtype in _HALVES, "MergeState kernel launch failed: unsupported data type.")


def _merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    v, s = v.to(torch.float64), s.to(torch.float64)
    top = s.amax(1, keepdim=True)
    weights = torch.exp2(s - torch.where(torch.isneginf(top), 0.0, top))
    total = weights.sum(1)
    safe = torch.where(total == 0, 1.0, total)
    merged = (v * weights[..., None]).sum(1) / safe[..., None]
    return merged, (torch.log2(total) + torch.where(torch.isneginf(top[:, 0]), 0.0, top[:, 0])).float()


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:  # fmt: skip
    """KV tokens of each request."""
    return kv_lengths(kv_indptr, kv_last_page_len, page_size)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each appended token; rows that belong to nobody get -1 and 0."""
    owners = torch.full((nnz,), -1, dtype=torch.int32) if batch_indices is None else batch_indices.fill_(-1)
    places = torch.zeros(nnz, dtype=torch.int32) if positions is None else positions.fill_(0)
    for name, x in (("batch_indices", owners), ("positions", places)):
        check_like(x, (nnz,), torch.int32, name)
    for index, end in enumerate(append_indptr[1:].tolist()):
        start = int(append_indptr[index])
        owners[start:end] = index
        first = int(seq_lens[index]) - (end - start)
        places[start:end] = torch.arange(first, first + end - start, dtype=torch.int32)
    return owners, places


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Store rows by request and position; rows with a negative request are dropped."""
    check_layout(kv_layout)
    caches = [token_major(x, kv_layout) for x in unpack_cache(paged_kv_cache, kv_layout)]
    for cache, rows in zip(caches, (append_key, append_value), strict=True):
        check(cache.dtype == rows.dtype, f"append of {rows.dtype} into a cache of {cache.dtype}")
        _append(cache, rows, batch_indices, positions, kv_indices, kv_indptr)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Store latent and rope rows `[T, size]` in caches `[N, P, size]`."""
    for cache, rows in ((ckv_cache, append_ckv), (kpe_cache, append_kpe)):
        assert cache is not None
        _append(cache, rows, batch_indices, positions, kv_indices, kv_indptr)


def _append(
    cache: torch.Tensor,
    rows: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    page_size = cache.shape[1]
    for row, (owner, place) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if owner >= 0:
            page = int(kv_indices[int(kv_indptr[owner]) + place // page_size])
            cache[page, place % page_size] = rows[row]
