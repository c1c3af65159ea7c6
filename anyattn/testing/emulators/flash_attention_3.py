"""What FlashAttention-3's compiled `fwd` and `get_scheduler_metadata` compute on SM90.

From `hopper/flash_api.cpp`, `tile_size.h` and `softmax.h` of the forks that ship it: when pages are loaded
whole, rows without keys, sizes of the scheduler's metadata. Numbers in float64.
"""

from __future__ import annotations

import math

import torch

from anyattn.testing.emulators.flash_attention_call import (
    Build,
    Forward,
    Heads,
    Mask,
    check_call,
    metadata_size,
)
from anyattn.testing.emulators.softmax import attend, band, check, fingerprint, gather, offsets

__all__ = ["forward", "scheduler_metadata"]

Tensor = torch.Tensor


def _tiles(heads: Heads, mask: Mask) -> tuple[int, int]:
    """(kBlockM, kBlockN) of the SM90 kernel, pages by TMA."""
    narrow = mask.causal or mask.local
    if heads.fp8:
        columns = {64: 160, 128: 224, 192: 160, 256: 64 if mask.local else 128}
    else:
        columns = {
            64: 128 if narrow else 192,
            128: 128 if narrow else 176,
            192: 96 if mask.local else (128 if heads.v_dim <= 128 else 112),
            256: 64 if mask.local else 80,
        }
    size = next(n for n in columns if heads.dim <= n)
    if heads.v_dim in (256, 512) and size == 64 and not heads.fp8:
        return (64, 64) if heads.v_dim == 512 else (128, 96)
    return (192 if size == 64 else 128), columns[size]


def _whole_pages(call: Forward) -> bool:
    """Pages come in by TMA: whole, with what stands behind the last token."""
    if call.page_table is None:
        return False
    rows, columns = _tiles(call.heads, call.mask)
    return bool(call.k.shape[1] % columns == 0 and call.seqlen_q * call.heads.group > rows)


def _marks(heads: Heads, mask: Mask, splits: int, page: int | None, *values: object) -> int:
    """The scheduler's view of a launch: what its numbers of blocks and splits follow from."""
    kernel = (heads, mask.causal, mask.local, max(splits, 0), page)
    return fingerprint(kernel, *values)


def scheduler_metadata(
    heads: Heads, mask: Mask, *, batch_size: int, num_splits: int, page_size: int | None,
    cache_seqlens: Tensor, cu_seqlens_q: Tensor | None, pack_gqa: bool | None,
) -> Tensor:  # fmt: skip
    """The buffer that `get_scheduler_metadata` returns, int32. Its contents are the stand-in's own: marks of
    the launch and of the lengths, by which `forward` knows whether it is the right one."""
    check(cache_seqlens.dtype == torch.int32, "expected scalar type Int but found another for seqused_k")
    check(cache_seqlens.shape == (batch_size,), "seqused_k must have shape (batch_size,)")
    found = torch.zeros(metadata_size(batch_size, mask), dtype=torch.int32, device=cache_seqlens.device)
    found[0] = _marks(heads, mask, num_splits, page_size, batch_size, pack_gqa)
    found[1] = fingerprint(cache_seqlens)
    found[2] = fingerprint(cu_seqlens_q)
    return found


def _stale(call: Forward) -> bool:
    """The metadata are those of another launch or of other lengths. (Of other lengths the library computes
    right numbers at a bad balance today; nothing promises it.)"""
    if call.metadata is None:
        return False
    page = None if call.page_table is None else call.k.shape[1]
    marks = (
        _marks(call.heads, call.mask, call.num_splits, page, call.batch_size, call.pack_gqa),
        fingerprint(call.seqused_k),
        fingerprint(call.cu_seqlens_q),
    )
    return call.metadata[:3].tolist() != list(marks)


def forward(call: Forward, build: Build) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(out, softmax_lse, out_accum, softmax_lse_accum)` of the compiled library.

    out `[T, Hq, Dv]` or `[B, Sq, Hq, Dv]`; LSE natural-log float32 `[Hq, T]` or `[B, Hq, Sq]`.

    Raises:
        RuntimeError: what the library refuses.
        EmulationError: what it takes and this stand-in doesn't know.
    """
    check_call(call, build)
    heads = call.heads
    q = call.q.reshape(-1, heads.num_q, heads.dim)
    out = torch.full((q.shape[0], heads.num_q, heads.v_dim), math.nan, dtype=torch.float64)
    lse = torch.full((q.shape[0], heads.num_q), math.nan, dtype=torch.float64)
    if not _stale(call) and not _miscompiled(call, build):
        for index, rows in enumerate(_query_rows(call)):
            if rows.stop > rows.start:
                out[rows], lse[rows] = _request(call, q[rows], rows, index)
    dtype = torch.bfloat16 if heads.fp8 else call.q.dtype
    shaped = out.to(dtype).reshape(*call.q.shape[:-1], heads.v_dim)
    result = shaped if call.out is None else call.out.copy_(shaped)
    if call.cu_seqlens_q is None:
        lse = lse.reshape(*call.q.shape[:2], heads.num_q).transpose(1, 2).contiguous()
        return result, lse.to(torch.float32), *_unsplit()
    return result, lse.T.to(torch.float32).contiguous(), *_unsplit()


def _unsplit() -> tuple[Tensor, Tensor]:
    """Where the partial results of splits would stand."""
    return torch.tensor([], dtype=torch.float32), torch.tensor([], dtype=torch.float32)


def _miscompiled(call: Forward, build: Build) -> bool:
    """Unequal head sizes of a build without their kernels pass its checks and run some other kernel."""

    def rounded(size: int) -> int:
        return next((n for n in (64, 128, 192, 256) if size <= n), 512)

    return not build.unequal and rounded(call.heads.dim) != rounded(call.heads.v_dim)


def _query_rows(call: Forward) -> list[slice]:
    """Rows of q, flattened, that each request's kernel blocks cover; beyond `max_seqlen_q` none do."""
    if call.cu_seqlens_q is None:
        length = call.q.shape[1]
        spans = [(i * length, (i + 1) * length) for i in range(call.q.shape[0])]
    else:
        spans = offsets(call.cu_seqlens_q)
    if call.seqused_q is not None:
        used = call.seqused_q.tolist()
        spans = [(start, min(stop, start + int(n))) for (start, stop), n in zip(spans, used, strict=True)]
    return [slice(start, stop) for start, stop in spans]


def _keys(call: Forward, index: int) -> tuple[Tensor, Tensor, int, bool]:
    """(k, v, length, poisoned) of a request; the tensors run past the length where tiles do."""
    length = None if call.seqused_k is None else int(call.seqused_k[index])
    if call.page_table is not None:
        row = call.page_table[index]
        length = row.shape[0] * call.k.shape[1] if length is None else length
        whole = _whole_pages(call)
        stop = -(-length // call.k.shape[1]) * call.k.shape[1] if whole else length
        return gather(call.k, row, stop), gather(call.v, row, stop), length, whole
    if call.cu_seqlens_k is not None:
        start, end = offsets(call.cu_seqlens_k)[index]
        end = end if length is None else start + length
        return call.k[start:end], call.v[start:end], end - start, False
    length = call.k.shape[1] if length is None else length
    return call.k[index, :length], call.v[index, :length], length, False


def _request(call: Forward, q: Tensor, rows: slice, index: int) -> tuple[Tensor, Tensor]:
    heads, mask = call.heads, call.mask
    k, v, length, poisoned = _keys(call, index)
    seen = band(q.shape[0], k.shape[0], mask.left, mask.right, last=length - 1)
    seen[:, length:] = False
    scale = torch.full((heads.num_q,), call.softmax_scale, dtype=torch.float64)
    v = v.to(torch.float64)
    if heads.fp8:
        scale = scale * _descale(call.q_descale, index, heads) * _descale(call.k_descale, index, heads)
        v = v * _descale(call.v_descale, index, heads)[:: heads.group, None]
    own, keys = q.to(torch.float64), k.to(torch.float64)
    if call.qv is not None:
        own_v = call.qv.reshape(-1, heads.num_q, heads.v_dim)[rows].to(torch.float64)
        own = own_v if call.only_qv else torch.cat([own, own_v], -1)
        keys = v if call.only_qv else torch.cat([keys, v], -1)
    out, lse = attend(own, keys, v, seen, scale=scale, cap=call.softcap, sinks=call.sinks, poisoned=poisoned)
    empty = ~seen.any(1)
    # Blocks without keys store -inf. A row without keys in a block that has some adds exp(sink - -inf).
    lse[empty] = -math.inf if call.sinks is None or not length else math.nan
    if call.cu_seqlens_q is not None:
        out[call.seqlen_q :], lse[call.seqlen_q :] = math.nan, math.nan
    return out, lse


def _descale(x: Tensor | None, index: int, heads: Heads) -> Tensor:
    """Per query head, float64."""
    if x is None:
        return torch.ones(heads.num_q, dtype=torch.float64)
    return x[index].to(torch.float64).repeat_interleave(heads.group)
