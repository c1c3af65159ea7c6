"""Hopper's extend, emulated: its rows, tiles, masks and barriers, against attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gluon_emulated import Descriptor, Pointer, functions, run

_FOLDER = Path(__file__).parents[2] / "anyattn" / "kernels" / "triton"
_FILES = (_FOLDER / "extend_hopper_fetch.py", _FOLDER / "extend_hopper.py")
OUTSIDE = 1 << 30
UNTOUCHED = -7.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """`lengths`: cached and new tokens of each request. `page` 0: from k and v."""

    lengths: tuple[tuple[int, int], ...]
    group: int = 4
    kv_heads: int = 1
    dim: int = 64
    page: int = 16
    box: int = 16
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    layout: str = "NHD"
    mapped: bool = False
    programs: int = 3
    few: int = 0


def _tokens(case: Case, rng: Any) -> list[dict[str, np.ndarray]]:
    heads = case.group * case.kv_heads
    return [
        {
            "q": rng.standard_normal((new, heads, case.dim)),
            "k": rng.standard_normal((cached + new, case.kv_heads, case.dim)),
            "v": rng.standard_normal((cached + new, case.kv_heads, case.dim)),
        }
        for cached, new in case.lengths
    ]


def _reference(case: Case, tokens: list[dict[str, np.ndarray]], sinks: np.ndarray) -> tuple[Any, Any]:
    outs, lses = [], []
    for (cached, new), each in zip(case.lengths, tokens, strict=True):
        k, v = (np.repeat(each[name], case.group, axis=1) for name in "kv")
        s = np.einsum("thd,nhd->htn", each["q"], k) * case.dim**-0.5
        if case.cap:
            s = case.cap * np.tanh(s / case.cap)
        row, column = cached + np.arange(new)[:, None], np.arange(cached + new)[None, :]
        seen = column <= row
        if case.window:
            seen = seen & (column > row - case.window)
        s = np.where(seen, s, -np.inf)
        if case.sinks:
            s = np.concatenate([s, np.broadcast_to(sinks[:, None, None], (*s.shape[:2], 1))], axis=2)
        lse = np.logaddexp.reduce(s, axis=2)
        p = np.exp(s - lse[:, :, None])[:, :, : cached + new]
        outs.append(np.einsum("htn,nhd->thd", p, v))
        lses.append(lse.T)
    return np.concatenate(outs), np.concatenate(lses)


def _pool(case: Case, tokens: list[dict[str, np.ndarray]], rng: Any) -> dict[str, Any]:
    """Pages in any order, NaN wherever no token is that the window may reach."""
    page, heads, dim = case.page, case.kv_heads, case.dim
    count = sum(-(-sum(lengths) // page) for lengths in case.lengths) + 2
    order = list(rng.permutation(count - 1) + 1)
    width = max(sum(lengths) for lengths in case.lengths) + page
    table = np.zeros((len(tokens) + 1, width), np.int32)
    k, v = (np.full((count, page, heads, dim), np.nan, np.float32) for _ in range(2))
    starts = []
    for i, ((cached, _), each) in enumerate(zip(case.lengths, tokens, strict=True)):
        total = len(each["k"])
        start = 0 if case.window is None else max(0, cached - case.window + 1) // page * page
        starts.append(start)
        for first in range(start, total, page):
            at = order.pop()
            rows = min(page, total - first)
            table[i, first : first + page] = at * page + np.arange(page)
            k[at, :rows], v[at, :rows] = each["k"][first : first + rows], each["v"][first : first + rows]
        table[i, :start] = -(1 << 20)  # nobody may look
    if case.layout == "HND":
        k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(-1, dim) for x in (k, v))
        places = {"k_h": 0, "page_rows": heads * page, "head_rows": page}
    else:
        k, v = (x.reshape(count * page, heads * dim) for x in (k, v))
        places = {"k_h": dim, "page_rows": page, "head_rows": 0}
    slot_map = None
    if case.mapped:
        slot_map = np.zeros(count * page * 2, np.int32)
        slot_map[count * page :] = np.arange(count * page)
        table = table + count * page
    return {"k": k, "v": v, "table": table, "starts": starts, "map": slot_map, **places}


def _given(tokens: list[dict[str, np.ndarray]], case: Case) -> dict[str, Any]:
    k, v = (np.concatenate([each[name] for each in tokens]).astype(np.float32) for name in "kv")
    flat = [x.reshape(len(x), -1) for x in (k, v)]
    places = {"k_h": case.dim, "page_rows": 0, "head_rows": 0}
    table, starts = np.zeros((len(tokens) + 1, 1), np.int32), [0] * len(tokens)
    return {"k": flat[0], "v": flat[1], "table": table, "starts": starts, "map": None, **places}


def _run(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    tokens = _tokens(case, rng)
    keys = _pool(case, tokens, rng) if case.page else _given(tokens, case)
    group, dim, heads = case.group, case.dim, case.group * case.kv_heads
    q = np.concatenate([each["q"] for each in tokens]).astype(np.float32)
    offsets = np.cumsum([0, *(new for _, new in case.lengths)]).astype(np.int32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    out, lse = (
        np.full(q.size + 64, UNTOUCHED, np.float32),
        np.full(len(q) * heads + 64, UNTOUCHED, np.float32),
    )
    rows = Pointer(q.reshape(-1)) if 64 % group else Descriptor(q, (64 // group, group, 64))
    block_n = 64 if dim == 256 else 128
    box = case.box if case.page else block_n
    one = Pointer(np.ones(1, np.float32))
    int32 = lambda x: Pointer(np.asarray(x, np.int32))  # noqa: E731
    run(
        functions(*_FILES)["extend_hopper_kernel"], case.programs,
        rows, Descriptor(keys["k"], (box, 64)), Descriptor(keys["v"], (box, 64)),
        int32(keys["table"].reshape(-1)), int32(range(len(tokens))), int32(offsets),
        int32([cached for cached, _ in case.lengths]), int32(keys["starts"]),
        Pointer(sinks), Pointer(out), Pointer(lse), len(tokens), case.few,
        None if keys["map"] is None else int32(keys["map"]), one, one,
        heads * dim, dim, keys["k_h"], keys["k_h"], keys["page_rows"], keys["head_rows"], OUTSIDE,
        keys["table"].shape[1], heads * dim, dim, heads, 0, 0,
        dim**-0.5, case.cap or 0.0, case.window or 0, case.kv_heads,
        case.page, group, group, dim, block_n, box, 2, 1 if dim == 256 else 2, case.page > 0,
        case.window is not None, case.cap is not None, case.sinks, True,
    )  # fmt: skip
    want, want_lse = _reference(case, tokens, sinks)
    assert (out[q.size :] == UNTOUCHED).all()
    for first, (_, new) in zip(offsets, case.lengths, strict=False):
        if new <= case.few:  # another kernel's
            want[first : first + new], want_lse[first : first + new] = UNTOUCHED, UNTOUCHED
    return out[: q.size].reshape(q.shape), lse[: len(q) * heads].reshape(len(q), heads), want, want_lse


_MIXED = ((0, 70), (37, 5), (0, 0), (130, 40), (260, 1))
_CASES = {
    "plain": Case(lengths=_MIXED),
    "two KV heads": Case(lengths=_MIXED, kv_heads=2, dim=128),
    "k and v": Case(lengths=((0, 70), (0, 0), (0, 5), (0, 140)), page=0),
    "group of 7": Case(lengths=_MIXED, group=7, kv_heads=2),
    "group of 7, wide heads": Case(lengths=_MIXED, group=7, dim=128, sinks=True),
    "group of 3, k and v": Case(lengths=((0, 70), (0, 45)), group=3, kv_heads=2, page=0),
    "group of 5": Case(lengths=_MIXED, group=5, cap=3.0),
    "group of 1": Case(lengths=((0, 300), (20, 130)), group=1),
    "D 256": Case(lengths=_MIXED, group=8, kv_heads=2, dim=256),
    "D 256, k and v": Case(lengths=((0, 90), (0, 33)), group=4, dim=256, page=0),
    "D 256, group of 7": Case(lengths=_MIXED, group=7, dim=256, window=50),
    "window": Case(lengths=_MIXED, window=40),
    "window of one": Case(lengths=_MIXED, window=1),
    "long window": Case(lengths=((400, 60), (0, 300), (900, 9)), window=300, group=8),
    "window, k and v": Case(lengths=((0, 500), (0, 30)), window=100, page=0),
    "window, group of 7": Case(lengths=((300, 60), (0, 200)), window=129, group=7, page=64, box=64),
    "page of 48": Case(lengths=_MIXED, page=48, box=16),
    "page of 64": Case(lengths=_MIXED, page=64, box=64, sinks=True, cap=2.0),
    "HND": Case(lengths=_MIXED, kv_heads=2, layout="HND"),
    "slot map": Case(lengths=_MIXED, mapped=True),
    "one program": Case(lengths=_MIXED, programs=1, kv_heads=2),
    "many requests": Case(lengths=tuple((i % 9, i * 7 % 5) for i in range(150)), programs=5),
    "few left out": Case(lengths=(*_MIXED, (9, 2), (30, 6), (500, 1)), kv_heads=2, few=5),
    "few of many left out": Case(
        lengths=tuple((i % 9, i * 7 % 5) for i in range(150)), programs=5, few=2, group=7
    ),
    "all left out": Case(lengths=((9, 2), (30, 3)), few=3),
    "more programs than blocks": Case(lengths=((3, 4),), programs=4),
}


@pytest.mark.parametrize("name", _CASES)
def test_rows_are_right(name: str) -> None:
    out, lse, want, want_lse = _run(_CASES[name])
    np.testing.assert_allclose(out, want, atol=2e-5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)


@pytest.mark.parametrize(("group", "blocks"), [(7, 14 + 1 + 2), (4, 8 + 1 + 2), (5, 10 + 1 + 2)])
def test_rows_lie_densely(group: int, blocks: int) -> None:
    """Requests of 256 tokens, one, two, and the fewest that take a second block."""
    new = (256, 1, 2, 128 // group + 1)
    offsets = Pointer(np.cumsum([0, *new]).astype(np.int32))
    count = functions(*_FILES)["count_blocks"]
    assert count(offsets, len(new), 0, group) == blocks + 1
    assert count(offsets, len(new), 2, group) == blocks - 1
