"""The compiled planner behind FlashInfer's decode wrapper, with the arguments that 0.7.2 gives it.

Read in flashinfer-python 0.7.2.post1: `plan` and `fast_decode_plan` in `flashinfer/decode.py`. The number of
arguments differs from kernel to kernel, and from version to version.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from anyattn.testing.emulators.flashinfer_decode_launch import Kernel, Schedule, written
from anyattn.testing.emulators.flashinfer_kernel import stamp

__all__ = ["DecodeModule", "Schedule", "decode_module"]

_COUNTS = {"fa2": 20, "fa3": 16, "cores": 15}


class DecodeModule:
    """`_cached_module`: `kernel` is fa2 or fa3 on tensor cores, or `cores` for CUDA cores."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.run = self.paged_run = Kernel(kernel)

    def plan(self, *args: Any) -> Schedule:
        """Write a schedule into the integer workspace.

        Raises:
            TypeError: another number of arguments. RuntimeError: host arrays that aren't on the host, aren't
                int32, or have another length than the batch.
        """
        if len(args) != _COUNTS[self.kernel]:
            raise TypeError(
                f"plan() of {self.kernel} takes {_COUNTS[self.kernel]} arguments, got {len(args)}"
            )
        _, ints, pinned, *rest = args
        if pinned.numel() < ints.numel():
            raise RuntimeError("the pinned workspace is smaller than the one on the device")
        if self.kernel == "cores":
            indptr, batch, *sizes = rest
            rows, lens = batch, None
        else:
            queries, indptr, lens, rows, batch, *sizes = rest
            _check_host(queries, batch + 1)
            _check_host(lens, batch)
            if int(queries[-1]) != rows:
                raise RuntimeError(f"qo_indptr ends at {int(queries[-1])}, not at {rows} rows")
        _check_host(indptr, batch + 1)
        pages = (indptr[1:] - indptr[:-1]).tolist()
        plain = tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in sizes)
        return written(Schedule(stamp(ints), pages, None if lens is None else lens.tolist(), rows, plain))


def _check_host(x: torch.Tensor, length: int) -> None:
    if x.dtype != torch.int32 or not x.is_cpu or x.shape != (length,):
        raise RuntimeError(
            f"expected int32 [{length}] on the host, got {x.dtype} {list(x.shape)} on {x.device}"
        )


@functools.cache
def decode_module(kernel: str, *built_for: Any) -> DecodeModule:
    """One for everything that a kernel is compiled for."""
    return DecodeModule(kernel)
