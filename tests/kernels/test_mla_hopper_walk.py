"""Hopper's latent decode, emulated: ranges that hold pieces of several requests, against float64.

Shared memory begins as NaN, a copy arrives when its group is waited for, and what it is copied to is NaN
until then: a tile of the wrong request, or read too early, is a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gluon_emulated
import numpy as np
import pytest
from gluon_emulated import Pointer, functions, run

_FOLDER = Path(__file__).parents[2] / "anyattn" / "kernels" / "triton"
_FILES = {"rows": "mla_hopper.py", "keys": "mla_hopper_keys.py"}
RANK, ROPE, BLOCK_N, SCALE, PAGE = 512, 64, 64, 0.05, 4
FEW_MIN = 2


class Tensor(np.ndarray):
    """A tensor or a scalar of a kernel: never changed in place."""

    type = SimpleNamespace(layout="")

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype).view(Tensor)

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Shared:
    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.dtype = memory, memory.dtype.type

    def index(self, i: Any) -> Shared:
        assert 0 <= i < len(self.memory)
        return Shared(self.memory[i])

    def slice(self, start: int, count: int, dim: int) -> Shared:
        assert dim == 1
        return Shared(self.memory[:, start : start + count])

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.memory.transpose(order))

    def load(self, layout: Any = None) -> Tensor:
        return tensor(self.memory.copy())

    def store(self, x: Any) -> None:
        self.memory[...] = x


class Copies:
    """`cp.async`: groups of copies, in order."""

    def __init__(self) -> None:
        self.started: list[tuple[Shared, Pointer]] = []
        self.groups: list[list[tuple[Shared, Pointer]]] = []

    def async_copy_global_to_shared(self, dst: Shared, at: Pointer) -> None:
        dst.memory[...] = np.nan
        self.started.append((dst, at))

    def commit_group(self) -> None:
        self.groups.append(self.started)
        self.started = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for dst, at in self.groups.pop(0):
                dst.memory[...] = at.array[at.offset]


def load(at: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset, mask = np.broadcast_arrays(at.offset, True if mask is None else mask)
    found = np.full(offset.shape, other, at.array.dtype)
    found[mask] = at.array[offset[mask]]
    return tensor(found)


def mma(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> np.ndarray:
    left = a.memory if isinstance(a, Shared) else a
    return np.asarray(left @ b.memory + (np.asarray(acc) if use_acc else 0.0))


def emulated(form: str) -> dict[str, Any]:
    names = functions(_FOLDER / "mla_hopper_tiles.py", _FOLDER / _FILES[form])
    made = vars(names["gl"]) | {
        "float16": np.float32, "load": load, "arange": lambda a, b, layout=None: tensor(np.arange(a, b)),
        "full": lambda shape, value, dtype, layout=None: tensor(np.full(shape, value, dtype)),
        "minimum": lambda a, b: tensor(np.minimum(a, b)), "maximum": lambda a, b: tensor(np.maximum(a, b)),
        "where": lambda c, a, b: tensor(np.where(c, a, b)), "abs": lambda x: tensor(np.abs(x)),
        "max": lambda x, axis: tensor(np.max(x, axis)), "sum": lambda x, axis: tensor(np.sum(x, axis)),
        "exp2": lambda x: tensor(np.exp2(x)), "log2": lambda x: tensor(np.log2(x)),
        "reshape": lambda x, shape: tensor(np.reshape(x, shape)), "multiple_of": lambda x, n: x,
        "program_id": lambda axis: tensor(gluon_emulated._grid.at),
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(np.full(shape, np.nan, np.float32)),
        "SwizzledSharedLayout": lambda *_: "", "DistributedLinearLayout": lambda *_: "",
    }  # fmt: skip
    names["gl"] = SimpleNamespace(**made)
    names["async_copy"] = Copies()
    names["barrier"] = lambda: None
    names["warpgroup_mma"] = mma
    names["warpgroup_mma_wait"] = lambda outstanding, deps: tensor(deps[0])
    return names


def dealt(lens: Sequence[int], num_ranges: int, parts: int) -> list[list[int]]:
    """Records by definition: equal ranges of the line of all tiles, or equal parts of each request."""
    tiles = [max(1, -(-n // BLOCK_N)) for n in lens]
    records = []
    if parts:
        for r in range(len(lens) * parts):
            b, step = r // parts, max(-(-tiles[r // parts] // parts), FEW_MIN)
            at = r % parts * step
            pieces = -(-tiles[b] // step)
            count = max(0, min(step, tiles[b] - at))
            records.append([b, at, count, 1, b, 0, lens[b], 0, b, pieces * (at == 0 and pieces > 1)])
        return records
    step = -(-sum(tiles) // num_ranges)
    line = [(b, at) for b, count in enumerate(tiles) for at in range(count)]
    for r in range(num_ranges):
        mine = line[r * step : (r + 1) * step]
        b, at = mine[0] if mine else (0, 0)
        records.append([b, at, len(mine), 1, b, 0, lens[b] if mine else 0, 0, 0, 0])
    return records


class Scene:
    def __init__(self, lens: Sequence[int], heads: int) -> None:
        rng = np.random.default_rng(5)
        self.lens, self.heads = list(lens), heads
        pages = [-(-n // PAGE) for n in lens]
        order = iter(rng.permutation(sum(pages)) + 1)
        self.cache = rng.standard_normal(((sum(pages) + 1) * PAGE, RANK + ROPE)).astype(np.float32)
        columns = max(pages) * PAGE + PAGE
        self.table = np.zeros((len(lens), columns), np.int32)
        for b, count in enumerate(pages):
            for page in range(count):
                self.table[b, page * PAGE : (page + 1) * PAGE] = next(order) * PAGE + np.arange(PAGE)
        used = np.zeros(len(self.cache), bool)
        for b, n in enumerate(lens):
            used[self.table[b, :n]] = True
        used[0] = True  # of the sink, a tile without keys is copied
        self.cache[~used] = np.nan
        self.q = rng.standard_normal((len(lens), heads, RANK + ROPE)).astype(np.float32)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((len(self.lens), self.heads, RANK))
        lse = np.full((len(self.lens), self.heads), -np.inf)
        for b, n in enumerate(self.lens):
            if n:
                keys = self.cache[self.table[b, :n]].astype(np.float64)
                s = self.q[b] @ keys.T * SCALE
                p = np.exp(s - s.max(1, keepdims=True))
                out[b] = p / p.sum(1, keepdims=True) @ keys[:, :RANK]
                lse[b] = s.max(1) + np.log(p.sum(1))
        return out, lse

    def run(self, num_ranges: int, parts: int, fp8: bool, form: str) -> tuple[np.ndarray, np.ndarray]:
        records = dealt(self.lens, num_ranges, parts)
        requests, heads, count = len(self.lens), self.heads, len(records)
        ranges = np.zeros((count, 16), np.int32)
        for at, record in enumerate(records):
            ranges[at, : len(record)] = record
        out = np.full((requests, heads, RANK), np.nan, np.float32)
        lse = np.full((requests, heads), np.nan, np.float32)
        part_out = np.full((count + requests, heads, RANK), np.nan, np.float32)
        part_lse = np.full((count + requests, heads), np.nan, np.float32)
        q, cache, table, to, lse_to, parts_to, lses_to = (
            Pointer(x.reshape(-1)) for x in (self.q, self.cache, self.table, out, lse, part_out, part_lse)
        )
        rows, lens = Pointer(np.arange(requests)), Pointer(np.array(self.lens, np.int32))
        of, one = Pointer(ranges.reshape(-1)), Pointer(np.ones(1, np.float32))
        width, split = RANK + ROPE, parts != 1
        strides = (heads * width, width, PAGE * width, width, self.table.shape[1])
        strides += (heads * RANK, RANK, heads)
        walk = split and not parts
        names = emulated(form)
        if form == "keys":
            args = (
                q, cache, table, rows, lens, of, one, to, lse_to, parts_to, lses_to, *strides, SCALE,
                PAGE, heads, 16, RANK, ROPE, BLOCK_N, True, split, walk, True, fp8, 4,
            )  # fmt: skip
            run(names["mla_keys_kernel"], count, *args)
        else:
            pack = min(heads, 64)
            args = (
                q, cache, table, rows, lens, of, of, of, of, of, one, to, lse_to, parts_to, lses_to,
                *strides, SCALE, 0, 0, 1, 1, PAGE, heads, pack, RANK, ROPE, BLOCK_N, True, False, True, split,
                walk, True, fp8, 8, not fp8,
            )  # fmt: skip
            run(names["mla_rows_kernel"], count * heads // pack, *args)
        self._merge(records, out, lse, part_out, part_lse)
        return out, lse

    def _merge(self, records: list[list[int]], *buffers: np.ndarray) -> None:
        """Of the ranges that have tiles of a request, when there are several."""
        out, lse, part_out, part_lse = buffers
        holders: dict[int, list[int]] = {}
        for r, (b, at, left, *_) in enumerate(records):
            while left > 0:
                tiles = max(1, -(-self.lens[b] // BLOCK_N))
                holders.setdefault(b, []).append(r)
                left -= min(left, tiles - at)
                b, at = b + 1, 0
        for b, held in holders.items():
            if len(held) > 1:
                rows = np.array(held) + b
                assert np.isnan(out[b]).all(), "a request that was cut has no output yet"
                lse[b] = np.logaddexp.reduce(part_lse[rows], axis=0)
                out[b] = (np.exp(part_lse[rows] - lse[b])[..., None] * part_out[rows]).sum(0)


LENS = (70, 0, 300, 1, 64, 65, 0, 130)


@pytest.mark.parametrize("form", ["keys", "rows"])
@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize(
    ("lens", "ranges", "parts"),
    [
        (LENS, 4, 0),
        (LENS, 1, 0),
        (LENS, 40, 0),
        ((0, 0, 0, 40, 0), 2, 0),
        ((330, 63), 2, 3),
        ((130, 64, 0), 3, 1),
    ],
    ids=["walk", "one-range", "many-ranges", "mostly-empty", "parts", "whole"],
)
def test_ranges_make_requests(lens: Sequence[int], ranges: int, parts: int, fp8: bool, form: str) -> None:
    scene = Scene(lens, 5 if form == "keys" else 32)
    with np.errstate(divide="ignore", invalid="ignore"):
        found, wanted = scene.run(ranges, parts, fp8, form), scene.reference()
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_cursor_skips_requests_without_keys() -> None:
    """Tiles of the line, in order, are those of requests that have keys; then it stays where it is."""
    lens = (0, 70, 0, 0, 130, 5, 0)
    names = emulated("keys")
    rows, kv = Pointer(np.arange(len(lens))), Pointer(np.array(lens, np.int32))
    at = [tensor(x) for x in (0, 0, -BLOCK_N, 0, 8)]
    seen = []
    for _ in range(9):
        at = list(names["next_tile"](rows, kv, *at, BLOCK_N, True))
        seen.append((int(at[0]), int(at[2]), bool(at[2] < at[3])))
    live = [(b, n) for b, n, is_tile in seen if is_tile]
    assert live == [(1, 0), (1, 64), (4, 0), (4, 64), (4, 128), (5, 0)]
    assert not any(is_tile for _, _, is_tile in seen[len(live) :])
