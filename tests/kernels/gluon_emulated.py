"""Kernels in Gluon, for which Triton has no interpreter, as Python on the CPU: a thread for each partition.

Products are computed when they are waited for and not before, shared memory begins as NaN and copies arrive
at once, so that a wait too few is a wrong number, and one too many ends the test by time.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["Descriptor", "Pointer", "functions", "run"]

_PATIENCE = 20.0  # seconds


class Values(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype: Any) -> Values:
        return self.astype(dtype).view(Values)


def _values(x: Any) -> Any:
    x = np.asarray(x)
    return x.item() if x.ndim == 0 else x.view(Values)


class Pointer:
    """Into a flat array."""

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        self.array, self.offset = array, offset
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.offset + more)


class Descriptor:
    """Boxes of an array; what lies outside of it reads as zero."""

    def __init__(self, array: np.ndarray, box: Sequence[int]) -> None:
        self.array, self.box, self.dtype = array, tuple(box), array.dtype

    def read(self, at: Sequence[int]) -> np.ndarray:
        found = np.zeros(self.box, self.array.dtype)
        inside = tuple(
            slice(min(a, n), min(a + b, n)) for a, b, n in zip(at, self.box, self.array.shape, strict=True)
        )
        part = self.array[inside]
        found[tuple(slice(0, n) for n in part.shape)] = part
        return found


class Shared:
    """Shared memory whose rows lie in parts of 64 columns, `[buffers, parts, rows, 64]`."""

    def __init__(self, memory: np.ndarray, box: Sequence[int], turned: bool = False) -> None:
        self.memory, self.box, self.turned, self.dtype = memory, tuple(box), turned, memory.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.memory)
        return Shared(self.memory[i], self.box)

    def slice(self, start: int, count: int) -> Shared:
        return Shared(self.memory[:, start : start + count], (count, self.box[1]))

    def permute(self, order: tuple[int, int]) -> Shared:
        assert order == (1, 0)
        return Shared(self.memory, self.box, True)

    def load(self, layout: Any = None) -> Values:
        rows = np.concatenate(list(self.memory), axis=1).reshape(self.box).view(Values)
        return rows.T if self.turned else rows

    def store(self, x: np.ndarray) -> None:
        parts = len(self.memory)
        for at, part in enumerate(np.split(np.asarray(x).reshape(-1, parts * 64), parts, axis=1)):
            self.memory[at] = part

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        flat = self.memory.reshape(shape[0], 1, -1, 64)
        assert flat.size == np.prod(shape)
        return Shared(flat, shape[1:])


class Barrier:
    """An mbarrier: phases that end when all have arrived and all bytes too."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, count: int = 1, tx: int = 0) -> None:
        with self.changed:
            self.left -= count
            self.bytes += tx
            assert self.left >= 0, "more arrivals than threads"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != parity, _PATIENCE)
            assert done, "a barrier that nobody comes to"


class Barriers(list[Barrier]):
    def index(self, i: int) -> Barrier:  # type: ignore[override]
        return self[i]


class _Product:
    def __init__(self, compute: Callable[[], np.ndarray]) -> None:
        self.compute, self.result = compute, None


_mine = threading.local()


def _queue() -> list[_Product]:
    if not hasattr(_mine, "queue"):
        _mine.queue = []
    return _mine.queue


def _matrix(x: Any) -> np.ndarray:
    return np.asarray(x.load() if isinstance(x, Shared) else x, np.float32)


def warpgroup_mma(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
    held = a if isinstance(a, Shared) else np.array(a)
    product = _Product(lambda: _matrix(held) @ _matrix(b) + (acc if use_acc else 0.0))
    _queue().append(product)
    return product


def warpgroup_mma_wait(outstanding: int, deps: Sequence[_Product]) -> Values:
    queue = _queue()
    while len(queue) > outstanding:
        product = queue.pop(0)
        product.result = product.compute().astype(np.float32).view(Values)
    assert deps[0].result is not None, "a product that wasn't waited for"
    return deps[0].result


def _load(at: Pointer, mask: Any = None, other: Any = 0) -> Any:
    offset, mask = np.broadcast_arrays(at.offset, True if mask is None else mask)
    found = np.full(offset.shape, 0 if other is None else other, at.array.dtype)
    found[mask] = at.array[offset[mask]]
    return _values(found)


def _store(at: Pointer, value: Any, mask: Any = None) -> None:
    offset, value, mask = np.broadcast_arrays(at.offset, value, True if mask is None else mask)
    at.array[offset[mask]] = value[mask]


def _copy(dst: Shared, at: Pointer, mask: Any) -> None:
    found, there = dst.load().copy(), np.broadcast_to(mask, at.offset.shape)
    found[there] = at.array[at.offset[there]]
    dst.store(found)


def _tma(desc: Descriptor, at: Sequence[int], barrier: Barrier, dst: Shared) -> None:
    box = desc.read(at)
    assert box.shape == tuple(dst.box)
    dst.store(box)
    barrier.arrive(0, -box.size * 2)


def _expect(barrier: Barrier, size: int) -> None:
    barrier.arrive(1, size)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(Barrier() for _ in range(shape[0]))
    buffers, rows, columns = shape
    return Shared(np.full((buffers, columns // 64, rows, 64), np.nan, np.float32), (rows, columns))


def _in_threads(partitions: Sequence[tuple[Callable[..., None], Sequence[Any]]], *_: Any) -> None:
    failed: list[BaseException] = []

    def work(function: Callable[..., None], args: Sequence[Any]) -> None:
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE)
    if failed:
        raise failed.pop(0)  # kept in a local, it would hold all callers in a cycle
    assert not any(thread.is_alive() for thread in threads)


_grid = SimpleNamespace(size=1, at=0)


def _nothing(*_: Any, **__: Any) -> str:
    return ""


_language = SimpleNamespace(
    constexpr=object, float32=np.float32, int32=np.int32, int64=np.int64,
    static_range=range, cdiv=lambda a, b: -(-a // b),
    program_id=lambda axis: _grid.at, num_programs=lambda axis: _grid.size, num_warps=lambda: 4,
    arange=lambda a, b, layout=None: np.arange(a, b).view(Values),
    full=lambda shape, value, dtype, layout=None: np.full(shape, value, dtype).view(Values),
    zeros=lambda shape, dtype, layout=None: np.zeros(shape, dtype).view(Values),
    load=_load, store=_store,
    minimum=lambda a, b: _values(np.minimum(a, b)), maximum=lambda a, b: _values(np.maximum(a, b)),
    where=lambda c, a, b: _values(np.where(c, a, b)),
    max=lambda x, axis: _values(np.max(x, axis)), sum=lambda x, axis: _values(np.sum(x, axis)),
    exp=lambda x: np.exp(x), exp2=lambda x: np.exp2(x), log=lambda x: np.log(x), log2=lambda x: np.log2(x),
    expand_dims=lambda x, axis: np.expand_dims(x, axis).view(Values),
    convert_layout=lambda x, layout: x,
    associative_scan=lambda x, axis, f: np.cumsum(x, axis).view(Values),
    inline_asm_elementwise=lambda text, constraints, args, **_: args[0],
    allocate_shared_memory=_allocate, warp_specialize=_in_threads,
    BlockedLayout=_nothing, SliceLayout=_nothing, NVMMADistributedLayout=_nothing,
    NVMMASharedLayout=_nothing, DotOperandLayout=_nothing,
)  # fmt: skip


def functions(*files: Path) -> dict[str, Any]:
    """All functions of these files that `gluon.jit` decorates, as Python."""
    names: dict[str, Any] = {
        "gl": _language, "fence_async_shared": _nothing, "threads_meet": _nothing,
        "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=_init, expect=_expect,
            wait=lambda barrier, parity: barrier.wait(parity),
            arrive=lambda barrier, count=1: barrier.arrive(count),
        ),
        "tma": SimpleNamespace(async_copy_global_to_shared=_tma),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=_copy, commit_group=_nothing, wait_group=_nothing
        ),
    }  # fmt: skip
    for file in files:
        tree = ast.parse(file.read_text())
        kept: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                node.decorator_list = []
                kept.append(node)
        exec(compile(ast.Module(kept, []), str(file), "exec"), names)
    return names


def run(kernel: Callable[..., None], programs: int, *args: Any) -> None:
    """One program after the other."""
    _grid.size = programs
    for at in range(programs):
        _grid.at = at
        kernel(*args)
