"""An extend kernel as one layer's steps launch it: found once, launched again with other addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from anyattn.kernels.triton.configs import Extend
from anyattn.kernels.triton.launch import Fixed, Started, direct_device, is_descriptor, launch

__all__ = ["Arguments", "Way"]

_MOST = 512
"""Encoded descriptors that a launch keeps: of 128 bytes each, by the addresses that allocators give again."""

Arguments = tuple[Any, Any, Any]
"""Queries, keys and values as a kernel takes them: tensors, or descriptors of them."""


@dataclass(eq=False)
class Way:
    """A kernel and all that it is given in every step.

    `arguments(q, k, v)`: the first three of a call. `rest`: what follows those of the step. `tokens`: of a
    row block; `heads`: programs of one; `most`: of all, where they stay and take block after block, 0 = as
    many as there are. `reads_more`: of a step than the kernels with descriptors do.
    """

    kernel: Any
    config: Extend
    arguments: Callable[[torch.Tensor, Any, Any], Arguments]
    rest: tuple[Any, ...]
    constexprs: dict[str, Any]
    tokens: int
    heads: int
    most: int = 0
    reads_more: bool = False
    repeats: dict[tuple[Any, ...], _Repeat] = field(default_factory=dict)

    def start(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, step: tuple[torch.Tensor, ...],
        more: tuple[torch.Tensor, ...], few: int = 0,
    ) -> None:  # fmt: skip
        """`step`: the request table, rows into it, offsets, prefixes, starts, sinks, out, LSE. `more`: what
        the pointer kernel reads beyond that, () for others. `few`: see `ExtendStep`.
        """
        batch, device = step[1].shape[0], direct_device()
        blocks = q.shape[0] // self.tokens + batch
        grid = blocks * self.heads
        numbers: tuple[int, ...] = (batch, blocks, few)
        if self.most:
            grid, numbers = min(grid, self.most), (batch, few)
        if device < 0:
            self._launch(grid, q, k, v, (*step, *numbers, *more))
            return
        places = [x.data_ptr() for x in step]
        behind = [x.data_ptr() for x in more]
        odd = _odd(places, behind)
        repeat = self.repeats.get((device, odd))
        if repeat is None:
            compiled = self._launch(grid, q, k, v, (*step, *numbers, *more))
            if compiled is not None:
                self.repeats[device, odd] = _Repeat(compiled, self)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        repeat.run(
            grid,
            1,
            1,
            stream,
            *repeat.front,
            *repeat.first(q, k, v),
            *places,
            *numbers,
            *behind,
            *repeat.last,
        )

    def _launch(self, grid: int, q: torch.Tensor, k: Any, v: Any, step: tuple[Any, ...]) -> Any:
        config = self.config
        options = {} if config.maxnreg is None else {"maxnreg": config.maxnreg}
        return launch(
            self.kernel, (grid,), (*self.arguments(q, k, v), *step, *self.rest), self.constexprs,
            num_warps=config.num_warps, num_stages=config.num_stages, **options,
        )  # fmt: skip


def _odd(places: list[int], behind: list[int]) -> tuple[bool, ...]:
    """Which addresses aren't aligned, as kernels are specialised on that; () = all are."""
    together = 0
    for place in places:
        together |= place
    for place in behind:
        together |= place
    return () if together & 15 == 0 else tuple(place & 15 != 0 for place in (*places, *behind))


class _Repeat:
    """`run(*grid, stream, *front, *first(q, k, v), …, *last)`: `…` are the step's addresses and numbers."""

    __slots__ = ("_arguments", "_encode", "_known", "front", "last", "run")

    def __init__(self, compiled: Any, way: Way) -> None:
        started = Started(compiled, (*Fixed(*way.rest).values, *way.constexprs.values()))
        self.run, self.front, self.last = started.run, started.front, started.last
        self._arguments = way.arguments
        self._encode: Callable[[Any, int], list[Any]] | None = None
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        found = _without_encoding(self.run)
        if found is not None:
            self.run, self._encode = found

    def first(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> tuple[Any, ...]:
        """Queries, keys and values as the launcher takes them."""
        places: tuple[int, ...] = (q.data_ptr(), q.shape[0])
        if k is not None and v is not None:
            places += (k.data_ptr(), v.data_ptr(), k.shape[0])
        known = self._known.get(places)
        if known is not None:
            return known
        known, kept = self._lowered(self._arguments(q, k, v))
        if kept:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[places] = known
        return known

    def _lowered(self, arguments: Arguments) -> tuple[tuple[Any, ...], bool]:
        """Addresses and encoded descriptors; and whether no tensor is among them, which would stay alive."""
        values: list[Any] = []
        count = 0
        for x in arguments:
            if not is_descriptor(x):
                values.append(x.data_ptr())
            elif self._encode is None:
                return tuple(y if is_descriptor(y) else y.data_ptr() for y in arguments), False
            else:
                values += self._encode(x, count)
                count += 1
        return tuple(values), True


def _without_encoding(run: Any) -> tuple[Any, Callable[[Any, int], list[Any]]] | None:
    """`(run, encode)`: Triton's launcher for CUDA of a kernel with descriptors is a Python function that has
    them encoded, by `encode(descriptor, number)`, and calls the C function `run`. None: it is another.
    """
    code, cells = getattr(run, "__code__", None), getattr(run, "__closure__", None)
    if code is None or cells is None or run.__module__ != "triton.backends.nvidia.driver":
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    launcher, kinds = held.get("launcher"), held.get("tensordesc_meta")
    if launcher is None or not kinds or None in kinds:  # None: not encoded, the tensor is passed on
        return None
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return launcher, lambda x, number: list(make_tensordesc_arg(x, kinds[number]))
