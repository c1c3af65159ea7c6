"""The host side of the pull kernel: an upload that the device reads by itself."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.core.metadata.upload import UploadLayout
from anyattn.kernels.triton.launch import Started, direct_device, launch
from anyattn.kernels.triton.pull import pull_kernel

__all__ = ["MOST_PARTS", "Puller", "first_launch"]

MOST_PARTS = 5
"""Vectors of one upload: a decode step has three or four."""

_BLOCK = 256


class Puller:
    """`Uploader.pull` where launches are direct: elsewhere one costs more than the copy that it replaces."""

    def __init__(self) -> None:
        self._started: dict[tuple[int, int], Started] = {}

    def __call__(self, layout: UploadLayout, memory: torch.Tensor, address: int, stream: int) -> bool:
        """See `anyattn.core.metadata.upload.Pull`."""
        device = direct_device()
        kept = layout.pulled
        if kept is None or kept[0] != device:
            if device < 0 or layout.device_index not in (device, None):
                return False
            kept = layout.pulled = self._prepared(layout, memory, device)
        _, run, columns, rows, front, behind = kept
        if run is None:
            return False
        run(columns, rows, 1, stream, *front, address, *behind)
        return True

    def _prepared(self, layout: UploadLayout, memory: torch.Tensor, device: int) -> tuple[object, ...]:
        """`(device, run, columns, rows, front, arguments behind the source)`: the launch as `Started` has it;
        None for `run` where none is possible.
        """
        narrow, grid, numbers = _described(layout)
        none = (device, None, *grid, (), ())
        if len(layout.places) > MOST_PARTS or layout.region.data_ptr() & 15:
            return none
        started = self._started.get((device, narrow))
        if started is None:
            try:
                compiled = first_launch(layout, memory)
            except ValueError:  # memory that was pinned, and that devices can't read all the same
                return none
            if compiled is None:
                return none
            started = self._started[device, narrow] = Started(compiled, (narrow, _BLOCK))
        return device, started.run, *grid, started.front, (layout.region.data_ptr(), *numbers, *started.last)


def first_launch(layout: UploadLayout, memory: torch.Tensor) -> Any:
    """By Triton's own path, of vectors at the front of `memory`: what it compiled to, or None."""
    narrow, grid, numbers = _described(layout)
    constexprs = {"NARROW": narrow, "BLOCK": _BLOCK}
    return launch(pull_kernel, grid, (memory, layout.region, *numbers), constexprs, num_warps=4, num_stages=1)


def _described(layout: UploadLayout) -> tuple[int, tuple[int, int], tuple[int, ...]]:
    """Which vectors are stored as int32, the grid, and lengths and places as the kernel takes them."""
    places, more = layout.places, [0] * (MOST_PARTS - len(layout.places))
    lengths, to = [place.length for place in places], [place.at for place in places]
    narrow = sum((place.dtype is torch.int32) << i for i, place in enumerate(places))
    return narrow, (max(1, -(-max(lengths) // _BLOCK)), len(places)), (*lengths, *more, *to, *more)
