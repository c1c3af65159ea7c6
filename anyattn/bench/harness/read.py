"""A kernel that does nothing but read: what memory gives when nobody computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

__all__ = ["reader"]

_BLOCK = 8192
_PROGRAMS = 8
"""Programs per multiprocessor."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _read(source, out, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(program * BLOCK, length, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < length, other=0.0)
    tl.store(out + program, tl.sum(total))


def reader(source: torch.Tensor) -> Callable[[], object]:
    """A call that reads float32 `source`, fewer than 2**31 elements, once."""
    units = torch.cuda.get_device_properties(source.device).multi_processor_count
    out = torch.empty(units * _PROGRAMS, dtype=torch.float32, device=source.device)
    flat = source.view(-1)
    return lambda: _read[(out.numel(),)](flat, out, flat.numel(), BLOCK=_BLOCK, num_warps=8)
