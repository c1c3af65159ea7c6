"""What FlashInfer's wrappers share: the plan as frozen state, and attention of all its requests."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.flashinfer_common import FP8, chip, host_reads

__all__ = [
    "SQUARE",
    "Planned",
    "attend_requests",
    "check_kernel",
    "choose_backend",
    "legacy_keywords",
    "mask_bits",
    "pack_mask",
    "stamp",
    "stamped",
]

SQUARE = (64, 128, 256, 512)
"""Head sizes that the fa2 template has; fa3 has no 512."""

_serials = itertools.count(1)


def stamp(int_workspace: torch.Tensor) -> int:
    """Write a schedule: whoever plans with the same integer workspace overwrites it."""
    serial = next(_serials)
    int_workspace[:8].copy_(torch.tensor([serial], dtype=torch.int64).view(torch.uint8))
    return serial


def stamped(int_workspace: torch.Tensor, serial: int) -> bool:
    """The schedule of that plan still stands there."""
    return int(int_workspace[:8].clone().view(torch.int64)) == serial


@dataclass
class Planned:
    """What `plan` fixes beside the tables: sizes, dtypes, masks, scales."""

    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    causal: bool
    window_left: int
    cap: float
    sm_scale: float | None
    serial: int


def choose_backend(planned: Planned, custom_mask: bool, *, fp16_reduction: bool = False) -> str:
    """The library's `auto` rule of prefill: fa3 on Hopper where it can, else fa2."""
    lossy = planned.kv_dtype in FP8 and planned.q_dtype not in FP8
    if chip() != 90 or custom_mask or fp16_reduction or lossy:
        return "fa2"
    square = planned.dim == planned.v_dim and planned.dim in (64, 128, 256)
    return "fa3" if square or (planned.dim, planned.v_dim) == (192, 128) else "fa2"


def check_kernel(backend: str, planned: Planned) -> None:
    """Could this specialisation be built and run?

    Raises:
        RuntimeError: the build or the launch fails. ValueError: an unknown backend.
    """
    if backend not in ("fa2", "fa3"):
        raise ValueError(f"the stand-in has no {backend!r} kernel here")
    sizes = [(64, 64), (128, 128), (256, 256), (192, 128)] + [(512, 512)] * (backend == "fa2")
    if (planned.dim, planned.v_dim) not in sizes:
        raise RuntimeError(f"Ninja build failed: {backend}, head sizes {planned.dim}, {planned.v_dim}")
    halves = (torch.float16, torch.bfloat16)
    if planned.q_dtype not in halves:
        raise RuntimeError(f"Ninja build failed: {backend}, query dtype {planned.q_dtype}")
    if planned.kv_dtype not in (planned.q_dtype, *(FP8 if backend == "fa2" else ())):
        raise RuntimeError(f"Ninja build failed: {backend}, {planned.q_dtype} over {planned.kv_dtype}")
    if backend == "fa3" and chip() != 90:
        raise RuntimeError(f"CUDA error: no kernel image is available (fa3 on sm{chip()})")
    if planned.q_heads % planned.kv_heads:
        raise ValueError(f"num_qo_heads {planned.q_heads} isn't a multiple of {planned.kv_heads}")


def pack_mask(custom: torch.Tensor, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`segment_packbits`, little-endian: bits of each request padded to bytes, and their byte offsets.

    It reads the size of its result from the mask's device.
    """
    host_reads.append(("custom_mask", custom))
    ends, parts, offsets = [int(n) for n in cells.tolist()], [], [0]
    for start, stop in itertools.pairwise(ends):
        bits = custom[start:stop].to(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8, dtype=torch.int64)
        parts.append((bits.to(torch.int64) * weights).sum(1).to(torch.uint8))
        offsets.append(offsets[-1] + len(parts[-1]))
    packed = torch.cat(parts) if parts else custom.new_empty(0, dtype=torch.uint8)
    return packed, torch.tensor(offsets, dtype=torch.int32)


def mask_bits(packed: torch.Tensor, start: int, rows: int, columns: int) -> torch.Tensor:
    """Bool `[rows, columns]` from bytes that begin at `start`; past the buffer's end False."""
    place = torch.arange(rows * columns)
    at = (start + place // 8).clamp(min=0)
    inside = at < packed.shape[0]
    byte = packed.to("cpu", torch.int64)[at.clamp(max=max(0, packed.shape[0] - 1))] if len(packed) else at * 0
    return (((byte >> (place % 8)) & 1).bool() & inside).view(rows, columns)


def attend_requests(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    spans: list[tuple[int, int]],
    planned: Planned,
    scale: float,
    *,
    masks: list[torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    cap: float | None = None,
    window_left: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out `[T, Hq, Dv]` and natural LSE `[T, Hq]`, float64; rows of no request are left 0 and -inf.

    Causal rows stand right-aligned at the end of their keys. A custom mask replaces the causal rule; the
    window bounds the left side by the distance from a row's aligned place, whatever the mask.
    """
    out = torch.zeros(q.shape[0], q.shape[1], planned.v_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    left = planned.window_left if window_left is None else window_left
    for index, (start, stop) in enumerate(spans):
        k, v = keys[index], values[index]
        right = 0 if planned.causal and masks is None else -1
        seen = softmax.band(stop - start, k.shape[0], left, right)
        if masks is not None:
            seen &= masks[index]
        rows = softmax.attend(
            q[start:stop], k, v, seen, scale=scale, cap=planned.cap if cap is None else cap, sinks=sinks
        )
        out[start:stop], lse[start:stop] = rows
    return out, lse


def legacy_keywords(
    names: tuple[str, ...], positional: tuple[Any, ...], given: dict[str, Any]
) -> dict[str, Any]:
    """Deprecated positionals of 0.6 by name. Raises `TypeError` for too many or a repeated one."""
    if len(positional) > len(names):
        raise TypeError(f"plan() takes at most {len(names)} more positional arguments")
    found = dict(zip(names, positional, strict=False))
    if repeated := found.keys() & given.keys():
        raise TypeError(f"plan() got multiple values for {sorted(repeated)}")
    return found | given
