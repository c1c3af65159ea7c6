"""What AITER's attention kernels compute, for both generations of its API. Numbers in float64.

From `csrc/cpp_itfs/pa/{pa_v1.py,pa_kernels.cuh}`, `aiter/ops/mha.py`, the Triton `unified_attention` and
`csrc/py_itfs_cu/asm_mla.cu` of amd-aiter 0.1.7.post2.dev18 and of ROCm/aiter e404860 (v0.1.20).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.modules import current_host
from anyattn.testing.emulators.softmax import attend, band, check, gather, offsets

__all__ = [
    "Ragged",
    "chip",
    "fp8_dtype",
    "latent_rows",
    "one_number",
    "paged_rows",
    "ragged_rows",
    "unshuffled",
]

Tensor = torch.Tensor


def chip() -> str:
    """The emulated chip, such as `gfx942`."""
    return (current_host() or "rocm:gfx942").partition(":")[2][:6]


def fp8_dtype() -> torch.dtype:
    """The one 8-bit float of the chip: what the other chip wrote isn't readable."""
    return torch.float8_e4m3fnuz if chip() == "gfx942" else torch.float8_e4m3fn


def paged_rows(
    q: Tensor, caches: tuple[Tensor, Tensor], table: Tensor, lengths: Tensor, *, scale: float, window: int,
    cap: float, scales: tuple[float, float], bound: int,
) -> Tensor:  # fmt: skip
    """One query a request over caches `[N, P, Hkv, D]`; float64 `[B, Hq, D]`.

    `window`: keys seen, 0 = all. `bound`: partitions of 256 keys are launched up to it, later keys are lost
    and the result is garbage. Whole pages are multiplied, so NaN in a last page's tail comes out.
    """
    page = caches[0].shape[1]
    found = torch.full((q.shape[0], q.shape[1], caches[1].shape[3]), math.nan, dtype=torch.float64)
    for index, length in enumerate(int(n) for n in lengths.tolist()):
        if length > -(-bound // 256) * 256:
            continue
        whole = -(-length // page) * page
        keys, values = (gather(c, table[index], whole).double() for c in caches)
        seen = band(1, whole, window - 1 if window > 0 else -1, 0, last=length - 1)
        found[index : index + 1], _ = attend(
            q[index : index + 1], keys * scales[0], values * scales[1], seen, scale=scale, cap=cap,
            poisoned=True,
        )  # fmt: skip
    return found


def unshuffled(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, P, Hkv, D]` of the vectorised layouts: K `[N, Hkv, D/x, P, x]`, V `[N, Hkv, P/x, D, x]` or
    `[N, Hkv, D, P]`."""
    pages, heads, parts, page, x = key.shape
    k = key.permute(0, 3, 1, 2, 4).reshape(pages, page, heads, parts * x)
    if value.dim() == 4:
        return k, value.permute(0, 3, 1, 2)
    v = value.permute(0, 2, 4, 1, 3)  # [N, P/x, x, Hkv, D]
    return k, v.reshape(pages, page, heads, value.shape[3])


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """How queries of a ragged call see keys. `window` is (left, right), -1 unbounded."""

    scale: float
    cap: float
    causal: bool
    window: tuple[int, int]
    max_q: int
    sinks: Tensor | None = None
    scales: tuple[float, float] = (1.0, 1.0)


def ragged_rows(
    q: Tensor, cu_q: Tensor, keys: list[tuple[Tensor, Tensor]], how: Ragged
) -> tuple[Tensor, Tensor]:
    """float64 out `[T, Hq, Dv]` and natural-log LSE `[T, Hq]`; `keys` per request `[n, Hkv, D]`.

    Rows behind `max_q` of a request are launched by nobody.
    """
    dims = keys[0][1].shape[2] if keys else q.shape[2]
    out = torch.full((*q.shape[:2], dims), math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for (start, stop), (k, v) in zip(offsets(cu_q), keys, strict=True):
        rows = stop - start
        right = 0 if how.causal else how.window[1]
        seen = band(rows, k.shape[0], how.window[0], right)
        live = min(rows, how.max_q)
        own = slice(start, start + live)
        values = v.double() * how.scales[1]
        out[own], lse[own] = attend(
            q[own], k.double() * how.scales[0], values, seen[:live], scale=how.scale, cap=how.cap,
            sinks=how.sinks,
        )  # fmt: skip
    return out, lse


def latent_rows(
    q: Tensor, buffer: Tensor, cu_q: Tensor, indptr: Tensor, indices: Tensor, *, rank: int, scale: float,
    max_q: int, scales: tuple[float, float],
) -> Tensor:  # fmt: skip
    """Absorbed MLA over token indices; float64 `[T, Hq, rank]`, causal among a request's queries."""
    flat = buffer.reshape(-1, 1, buffer.shape[-1])
    out = torch.full((*q.shape[:2], rank), math.nan, dtype=torch.float64)
    spans = zip(offsets(cu_q), offsets(indptr), strict=True)
    for (start, stop), (first, last) in spans:
        slots = indices[first:last].long()
        inside = not slots.numel() or bool(((slots >= 0) & (slots < flat.shape[0])).all())
        check(inside, "illegal memory access: a slot outside of the pool")
        keys = flat[slots].double() * scales[1]
        seen = band(stop - start, keys.shape[0], -1, 0)
        live = min(stop - start, max_q)
        own = slice(start, start + live)
        out[own], _ = attend(q[own].double() * scales[0], keys, keys[..., :rank], seen[:live], scale=scale)
    return out


def one_number(scale: Any) -> float:
    """Kernels read the first element of a scale's tensor."""
    return 1.0 if scale is None else float(torch.as_tensor(scale).reshape(-1)[0])
