"""Every head size, KV type and row of the configuration tables: compiled on demand, when tiles change.

anyattn verify-compile --configs anyattn.kernels.triton.configs.aot_full:ENTRIES --target gfx942
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anyattn.kernels.triton.aot import Entry
from anyattn.kernels.triton.configs.aot_attention import (
    RDNA3_WIDE_HEADS,
    RDNA_WIDE_FLOAT32,
    Shape,
    attention_entry,
)

__all__ = ["ENTRIES", "HEAD_SIZES"]

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)

_KINDS = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "fp8": (torch.bfloat16, True),
    "float32": (torch.float32, False),
}
# Requests and new tokens each: decode below and above one program per unit, extends of 16, 64 and more rows.
_STEPS = {
    "decode-wide": (1, 1),
    "decode-narrow": (64, 1),
    "extend-16": (64, 4),
    "extend-64": (64, 16),
    "extend": (64, 512),
}


def _entries() -> Iterator[Entry]:
    """Everything that costs registers at once: cap, sinks, LSE; window, and in an extend two KV sources."""
    for kind, (dtype, fp8) in _KINDS.items():
        for dim in HEAD_SIZES:
            for step, (batch, new) in _STEPS.items():
                shape = Shape(
                    dim=dim,
                    dtype=dtype,
                    fp8=fp8,
                    batch=batch,
                    new=new,
                    cap=50.0,
                    window=4096,
                    sinks=True,
                    lse=True,
                )
                accepted = RDNA_WIDE_FLOAT32 if kind == "float32" else RDNA3_WIDE_HEADS
                kernel = "decode_kernel" if new == 1 else "extend_kernel"
                yield attention_entry(
                    f"{step}/d{dim}-{kind}", kernel, shape, spills=accepted if dim > 128 else None
                )


ENTRIES: tuple[Entry, ...] = tuple(_entries())
"""By step, head size and KV type."""
