"""Triton launches in the CPU recorder: the launch seam's hook, for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyattn.core.graph.recorder import record_call
from anyattn.kernels.triton.launch import set_hook

__all__ = ["recording_launches"]


@contextmanager
def recording_launches() -> Iterator[None]:
    """`RecorderPlatform(seams=[recording_launches])`: each launch becomes one recorded step.

    Grid, numbers and compile options are frozen, as in a device's graph.
    """
    previous = set_hook(_record)
    try:
        yield
    finally:
        set_hook(previous)


def _record(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constexprs: dict[str, Any],
    options: dict[str, int],
) -> bool:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    # The closure outlives the capture: it may hold no tensor.
    numbers = [None if isinstance(a, torch.Tensor) else a for a in args]
    named = {**constexprs, **options}

    def start(*given: torch.Tensor) -> None:
        values = list(numbers)
        for place, tensor in zip(places, given, strict=True):
            values[place] = tensor
        kernel[grid](*values, **named)

    record_call(start, tensors, f"triton kernel {kernel.__name__}")
    return True
