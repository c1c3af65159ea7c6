"""The compiled kernel behind FlashInfer's decode wrapper, with the arguments that 0.7.2 launches it with.

Work lists are read where they lie, in the integer workspace: a graph that has recorded the launch follows
what was planned there since. `_plan_info` says where in it they are, which follows from sizes alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.flashinfer_common import put, use_workspace
from anyattn.testing.emulators.flashinfer_kernel import Planned, attend_requests, stamped
from anyattn.testing.emulators.flashinfer_tables import PageTable

__all__ = ["Kernel", "Schedule", "written"]


@dataclass(frozen=True)
class Schedule:
    """`_plan_info`: what a plan was made for. `lens`: None where the kernel's planner isn't told any.

    `sizes`: heads, page, head sizes, window and whatever else the planner was given beside the lengths.
    """

    serial: int
    pages: list[int]
    lens: list[int] | None
    rows: int
    sizes: tuple[Any, ...]


_written: weakref.WeakValueDictionary[int, Schedule] = weakref.WeakValueDictionary()


def written(schedule: Schedule) -> Schedule:
    """It stands in a workspace from now on, under its serial."""
    _written[schedule.serial] = schedule
    return schedule


class Kernel:
    """`run` of CUDA cores, `paged_run` of tensor cores."""

    def __init__(self, kernel: str) -> None:
        """`kernel`: as of `DecodeModule`."""
        self.kernel = kernel

    def __call__(self, *args: Any) -> torch.Tensor:
        """Writes the output; returns the natural LSE, which kernels store or not.

        Raises:
            TypeError: another number of arguments.
        """
        if self.kernel == "cores":
            front, tables, results, after = _parted(args, 3, 8)
            causal, layout, numbers = False, after[0], (after[1], after[4], after[5])
        else:
            front, (_, *tables), results, after = _parted(args, 4, 19)
            causal, layout, numbers = bool(after[0]), after[1], (after[2], after[10], after[11])
        return self._attend(front, tables, results[0], layout, numbers, causal=causal)

    def _attend(
        self, front: tuple[Any, ...], tables: Sequence[torch.Tensor], out: torch.Tensor, layout: int,
        numbers: tuple[int, float, float], *, causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        floats, ints, info, q, k, v = front
        left, cap, scale = numbers
        indptr, indices, last = tables
        by_length, kv_layout = self.kernel == "fa3", "HND" if layout else "NHD"
        batch, heads = len(last), (q.shape[1], k.shape[1 if layout else 2], k.shape[2 if layout else 1])
        each = q.shape[0] // batch
        schedule: Schedule = _written.get(int(ints[:8].clone().view(torch.int64)), info)
        planned = Planned(*heads[:2], q.shape[2], v.shape[3], q.dtype, k.dtype, out.dtype, causal, left, cap,
                          scale, schedule.serial)  # fmt: skip
        table = PageTable(indptr, indices, last, schedule.pages, schedule.lens or [])
        fits = schedule.rows == info.rows == q.shape[0] and schedule.sizes == info.sizes
        fits = fits and schedule.sizes[:3] == heads and left in schedule.sizes
        if not (fits and stamped(ints, schedule.serial)):
            out.fill_(math.nan)
            return torch.full(q.shape[:2], math.nan, dtype=torch.float64)
        result, natural = attend_requests(
            q, table.keys(k, kv_layout, by_length=by_length), table.keys(v, kv_layout, by_length=by_length),
            [(i * each, (i + 1) * each) for i in range(batch)], planned, scale,
        )  # fmt: skip
        use_workspace(floats)
        put(out, result, strided=by_length)
        return natural


def _parted(args: tuple[Any, ...], tables: int, after: int) -> list[Any]:
    """Six arguments in front, those of the page table, out and lse, and the rest."""
    if len(args) != 8 + tables + after:
        raise TypeError(f"a launch takes {8 + tables + after} arguments, got {len(args)}")
    return [args[:6], args[6 : 6 + tables], args[6 + tables : 8 + tables], args[8 + tables :]]
