"""Triton launches in the CPU recorder: the launch seam's hook, for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from anyattn.core.graph.recorder import record_call
from anyattn.kernels.triton.launch import is_descriptor, set_hook

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
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) or is_descriptor(a)]
    tensors = [args[i].base if is_descriptor(args[i]) else args[i] for i in places]
    # The closure outlives the capture: it may hold no tensor.
    numbers = [_without_tensor(a) for a in args]
    named = {**constexprs, **options}

    def start(*given: torch.Tensor) -> None:
        values = list(numbers)
        for place, tensor in zip(places, given, strict=True):
            describe = values[place]
            values[place] = tensor if describe is None else describe(base=tensor)
        kernel[grid](*values, **named)

    record_call(start, tensors, f"triton kernel {kernel.__name__}")
    return True


def _without_tensor(arg: Any) -> Any:
    if is_descriptor(arg):
        kind: Any = type(arg)
        return partial(kind, **{f.name: getattr(arg, f.name) for f in fields(kind) if f.name != "base"})
    return None if isinstance(arg, torch.Tensor) else arg
