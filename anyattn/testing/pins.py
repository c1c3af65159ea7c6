"""Pinned cases: edges at which attention kernels have been wrong, each named after the fault it looks for.

Random and pairwise cases may miss an edge; these stand in every run. Sizes are drawn from what the backend
declares, so a pin is skipped, with the reason, only where its feature isn't declared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anyattn.core.capabilities import Feature, Phase
from anyattn.testing.cases import Case
from anyattn.testing.declared import Declared

__all__ = ["Shape", "check_cases", "pinned", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """Small sizes that the backend takes: what a pin builds on."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    page: int
    dtypes: tuple[str, str]
    layout: str = "NHD"
    fp8: tuple[tuple[str, str], ...] = ()
    lse: bool = True

    def case(self, **fields: Any) -> Case:
        """A case of this shape. It asks for the LSE where that is declared."""
        base = {
            "num_q_heads": self.heads[0], "num_kv_heads": self.heads[1],
            "head_dim": self.dims[0], "v_head_dim": self.dims[1],
            "page_size": self.page, "dtype": self.dtypes[0], "kv_dtype": self.dtypes[1],
            "slot_layout": "shuffled_pages", "layout": self.layout, "return_lse": self.lse,
        }  # fmt: skip
        return Case(**{**base, **fields})


def shape_of(declared: Declared, axes: dict[str, list[Any]]) -> Shape:
    """Small and typical: GQA where it is declared, the smallest head from 16 on, the smallest page from 4."""
    grouped = sorted(axes["heads"], key=lambda h: not (h[0] // h[1] == 2 and h[1] > 1))
    dims = min(axes["head_dims"], key=lambda d: (max(d) < 16, sum(d)))
    exact = [d for d in axes["dtypes"] if d[0] == d[1]]
    dtypes = max(exact or axes["dtypes"], key=lambda d: d[0] == "float32")
    fp8 = {kv: (model, kv) for model, kv in axes["dtypes"] if kv.startswith("float8")}
    layouts = ["NHD"] if "NHD" in axes["layout"] else axes["layout"]
    larger = sorted(p for p in axes["page"] if p >= 4) or [axes["page"][-1]]
    lse = declared.declares_jointly(Feature.LSE)
    shapes = [
        Shape(h, dims, p, dtypes, layout, tuple(fp8.values()), lse)
        for h in grouped
        for p in larger
        for layout in layouts
    ]
    return next((shape for shape in shapes if _declared_in(shape, declared)), shapes[0])


def _declared_in(shape: Shape, declared: Declared) -> bool:
    """All phases that share a pool take the shape."""
    one = {"prefix_lens": (3,), "extend_lens": (1,), "return_lse": False}
    modes = {Phase.PREFILL: "extend", Phase.DECODE: "decode"}
    return not any(
        declared.refusal(shape.case(mode=m, **one)) for p, m in modes.items() if p in declared.phases
    )


def _decode(shape: Shape, *lens: int, **fields: Any) -> Case:
    """A decode of requests with these KV lengths."""
    return shape.case(
        mode="decode", prefix_lens=tuple(n - 1 for n in lens), extend_lens=(1,) * len(lens), **fields
    )


def pinned(shape: Shape, long: int) -> Iterator[tuple[str, Case]]:
    """(name, case); `long`: the longest context worth its time here."""
    page, window = shape.page, 7
    extend = {"prefix_lens": (0, 5, 11), "extend_lens": (9, 3, 6)}
    yield from _windows(shape, page, window)
    yield "page edges, decode", _decode(shape, *(n * page + d for n in (1, 2) for d in (-1, 0, 1)), seed=1)
    yield (
        "page edges, extend",
        shape.case(prefix_lens=(page - 1, page, page + 1), extend_lens=(1, page, page + 1), seed=2),
    )
    for edge in (16, 32, 64, 128):
        yield f"tile edge {edge}", _decode(shape, edge - 1, edge, edge + 1, seed=edge)
    one = {"num_q_heads": shape.heads[0] // shape.heads[1], "num_kv_heads": 1}  # few programs: many splits
    yield "splits", _decode(shape, long, **one, seed=3)
    yield "splits, lengths that differ", _decode(shape, 1, long // 2 + 1, **one, seed=3)
    yield "splits with sinks", _decode(shape, long - 1, sinks=True, **one, seed=4)
    yield "nothing cached, nothing new", shape.case(prefix_lens=(0, 3, 0), extend_lens=(1, 0, 4), seed=5)
    yield "log-sum-exp", shape.case(**extend, seed=6)
    yield "causal rule", shape.case(**extend, return_lse=False, seed=6)
    yield "sinks", shape.case(**extend, sinks=True, seed=7)
    yield "sinks, decode", _decode(shape, 5, 1, 9, sinks=True, seed=8)
    yield "rows that see nothing", shape.case(**extend, mask="random", seed=9)
    yield "rows that see nothing, with sinks", shape.case(**extend, mask="random", sinks=True, seed=10)
    yield "logit cap", shape.case(**extend, logit_cap=1.5, seed=11)
    yield "logit cap, decode", _decode(shape, 5, 9, logit_cap=1.5, scale=0.9, seed=12)
    yield "softmax scale", shape.case(**extend, scale=0.7, seed=13)
    yield "softmax scale, output alone", shape.case(**extend, scale=0.7, return_lse=False, seed=13)
    yield "smaller value heads (Dv)", shape.case(**extend, v_head_dim=max(8, shape.dims[0] // 2), seed=57)
    yield "larger value heads (Dv)", shape.case(**extend, v_head_dim=2 * shape.dims[0], seed=57)
    for name, scale in (("tensor", 0.5), ("head", tuple(0.5 * 2.0**h for h in range(shape.heads[1])))):
        scales = {"k_scale": scale, "v_scale": scale}
        yield f"KV scales per {name}, decode", _decode(shape, 9, 4, **scales, seed=14)
        yield f"KV scales per {name}, extend", shape.case(**extend, **scales, seed=15)
    yield "scales, nothing stored", shape.case(**extend, k_scale=0.5, v_scale=2.0, kv="arguments", seed=16)
    yield "stored already", shape.case(**extend, kv="cached", seed=17)
    yield "nothing stored", shape.case(**extend, kv="arguments", seed=18)
    yield (
        "strided inputs, given output",
        shape.case(**extend, strided=True, give_out=True, flat=True, seed=19),
    )
    yield "inputs on the device", shape.case(**extend, device_ints=True, seed=20)
    yield "padding, decode", _decode(shape, 5, 9, padding=3, give_out=True, seed=21)
    yield "padding, extend", shape.case(**extend, padding=5, give_out=True, seed=22)
    yield (
        "mixed",
        shape.case(mode="mixed", prefix_lens=(0, 4, 9, 2), extend_lens=(6, 3, 1, 1), num_decode=2, seed=23),
    )
    yield "draft extend", shape.case(mode="draft_extend", prefix_lens=(8, 0), extend_lens=(3, 2), seed=24)
    yield from _trees(shape, window)
    yield from _few_tokens(shape, long, one)
    yield from _kinds(shape, window)
    for layout in ("contiguous", "interleaved", "non_monotonic"):
        yield f"{layout} slots", shape.case(**extend, slot_layout=layout, seed=31)
    yield "HND layout", shape.case(**extend, layout="HND", seed=48)
    for model, kv in shape.fp8:
        yield (
            f"{kv} saturates",
            shape.case(**extend, dtype=model, kv_dtype=kv, k_scale=0.005, v_scale=0.004, seed=49),
        )
    yield "wide group, decode", _decode(shape, 9, 3, num_q_heads=72, num_kv_heads=1, seed=50)
    yield "many requests", _decode(shape, *(1 + (5 * i) % 23 for i in range(17)), seed=32)


def _windows(shape: Shape, page: int, window: int) -> Iterator[tuple[str, Case]]:
    w = window
    yield "window, decode below, at and above", _decode(shape, w - 1, w, w + 1, window=w, seed=40)
    yield "window, decode far beyond", _decode(shape, 3 * w + page, 6 * w, window=w, seed=41)
    yield "window, decode inside a page", _decode(shape, 4 * page + 2, 5 * page, window=page + 1, seed=42)
    yield (
        "window, extend around it",
        shape.case(prefix_lens=(w - 3, w - 2, w - 1), extend_lens=(2, 2, 2), window=w, seed=43),
    )
    yield (
        "window, long prompt without a prefix",
        shape.case(prefix_lens=(0, 0), extend_lens=(3 * w, w + 1), window=w, seed=44),
    )
    yield (
        "window, query longer than it",
        shape.case(prefix_lens=(2 * w, 3), extend_lens=(2 * w + 1, w + 2), window=w, seed=45),
    )
    yield "window of one key", shape.case(prefix_lens=(5, 0), extend_lens=(4, 3), window=1, seed=46)
    yield "window with sinks", _decode(shape, 3 * w, w, window=w, sinks=True, seed=47)


def _trees(shape: Shape, window: int) -> Iterator[tuple[str, Case]]:
    verify = {"mode": "verify", "prefix_lens": (9, 4, 0), "extend_lens": (5, 3, 4)}
    yield "verify, a chain", shape.case(**verify, seed=25)
    yield "verify, a tree", shape.case(**verify, mask="tree", seed=26)
    yield (
        "verify, a tree in a window",
        shape.case(**{**verify, "prefix_lens": (19, 11, 6)}, mask="tree", window=window, seed=27),
    )
    yield "verify, any mask", shape.case(**verify, mask="random", seed=28)
    yield "one query with a mask", shape.case(prefix_lens=(9, 5), extend_lens=(1, 1), mask="random", seed=58)
    yield (
        "masks in a window",
        shape.case(prefix_lens=(12, 3), extend_lens=(5, 8), mask="random", window=window, seed=29),
    )


def _few_tokens(shape: Shape, long: int, one: dict[str, int]) -> Iterator[tuple[str, Case]]:
    """A few tokens on many keys: kernels that cut the keys of such steps do it here."""
    few = {"prefix_lens": (long, 40, 97), "extend_lens": (5, 3, 1), **one}
    chain = {**few, "mode": "verify"}
    yield "few tokens on many keys, a chain", shape.case(**chain, seed=60)
    yield "few tokens on many keys, a tree", shape.case(**chain, mask="tree", sinks=True, seed=61)
    yield (
        "few tokens on many keys, a tree in a window",
        shape.case(**chain, mask="tree", window=50, seed=62),
    )
    yield "few tokens on many keys, a window", shape.case(**few, window=45, logit_cap=1.5, seed=63)
    yield "few tokens on many keys, scales", shape.case(**few, k_scale=0.5, v_scale=2.0, seed=64)
    yield (
        "few tokens on many keys, nothing stored",
        shape.case(**few, mode="draft_extend", kv="arguments", seed=65),
    )
    beside = {"prefix_lens": (12, 5, 97, long), "extend_lens": (40, 9, 3, 1), **one}
    yield "few tokens beside a chunk", shape.case(**beside, sinks=True, seed=66)
    mixed = {**beside, "extend_lens": (40, 9, 1, 1), "mode": "mixed", "num_decode": 2}
    yield "few tokens beside a chunk, a mixed step", shape.case(**mixed, window=45, seed=67)
    yield "few tokens beside a chunk, scales", shape.case(**mixed, k_scale=0.5, v_scale=2.0, seed=68)


def _kinds(shape: Shape, window: int) -> Iterator[tuple[str, Case]]:
    """Encoder-decoder and bidirectional layers."""
    lens = {"prefix_lens": (0, 5), "extend_lens": (9, 4)}
    alone = {"prefix_lens": (0, 0), "extend_lens": (9, 4), "kv": "arguments"}
    yield "bidirectional", shape.case(**lens, kind="bidirectional", seed=33)
    yield "bidirectional window", shape.case(**lens, kind="bidirectional", window=4, seed=34)
    yield "encoder-only", shape.case(**alone, kind="encoder_only", seed=35)
    yield "encoder-only window", shape.case(**alone, kind="encoder_only", window=4, seed=36)
    yield "cross-attention", shape.case(**lens, kind="cross", encoder_lens=(window, 0), seed=37)
    yield "cross-attention, decode", shape.case(
        mode="decode", prefix_lens=(3, 6), extend_lens=(1, 1), kind="cross", kv="cached",
        encoder_lens=(1, 3 * window), seed=38,
    )  # fmt: skip


def check_cases(shape: Shape, declared: Declared) -> Iterator[tuple[str, Case]]:
    """(check, case) for every check beyond numbers."""
    extend = shape.case(prefix_lens=(6, 0, 9, 3), extend_lens=(4, 7, 1, 5), seed=51)
    decode = _decode(shape, 7, 1, 12, 4, seed=52)
    windowed = dataclasses.replace(extend, window=5)
    prompt = shape.case(prefix_lens=(0,), extend_lens=(21,), seed=53)
    for case in (prompt, dataclasses.replace(prompt, window=6), dataclasses.replace(prompt, sinks=True)):
        yield "chunked", case
    yield "served", extend
    yield "served", windowed
    yield "several-plans", extend
    yield "several-plans", dataclasses.replace(decode, window=5)
    yield "stable-buffers", extend
    yield "stable-buffers", dataclasses.replace(decode, window=5)
    for case in (extend, decode, windowed):
        yield "run-to-run", case
        yield "batch-invariant", case
    parts = _decode(shape, 5 * shape.page + 1, 8, seed=54)  # whole pages, so that the whole has pages too
    for case in (parts, dataclasses.replace(parts, mode="extend"), dataclasses.replace(parts, logit_cap=2.0)):
        yield "merge", case
        yield "sinks-once", case
    yield "merge-empty", dataclasses.replace(extend, padding=4)
    yield "merge-empty", dataclasses.replace(extend, mask="random", seed=52)  # a seed with empty rows
    yield from _layer_checks(shape, extend)
    one = {"num_q_heads": shape.heads[0] // shape.heads[1], "num_kv_heads": 1}
    yield "batch-invariant-chunks", shape.case(extend_lens=(200,), window=90, **one, seed=53)
    yield "long-step", prompt
    yield "poisoned-padding", dataclasses.replace(extend, padding=4)
    yield "poisoned-padding", dataclasses.replace(decode, padding=2)
    yield "idle", extend
    for case in (extend, decode, dataclasses.replace(decode, window=5), windowed):
        for name in ("host-lengths", "stale-lengths", "shared-reads", "no-host-sync"):
            yield name, case
    yield "shared-reads", dataclasses.replace(extend, device_ints=True)
    yield "undeclared-feature", extend
    if declared.rows[0].q_heads == () and declared.rows[0].group_sizes == ():
        yield "head-counts", extend
        yield "head-counts", decode
    yield "over-wide-layer", extend
    yield "other-plan", extend
    for page in (1, 4, 6, 16):
        for window in (None, 5):
            lens = shape.case(
                prefix_lens=(0, page - 1, page, page + 1, 3 * page, 7), extend_lens=(5, 1, 1, 2, page, 9),
                page_size=page, window=window, slot_layout="non_monotonic", seed=page,
            )  # fmt: skip
            yield "tables", lens
    yield "offsets-past-2-31", shape.case(
        prefix_lens=(40,), extend_lens=(1,), page_size=16, head_dim=128, v_head_dim=128, num_q_heads=16,
        num_kv_heads=8, dtype="bfloat16", kv_dtype="bfloat16", seed=55,
    )  # fmt: skip


def _layer_checks(shape: Shape, extend: Case) -> Iterator[tuple[str, Case]]:
    """Layers that share a plan, and the masks that drafters write."""
    yield "layer-masks", dataclasses.replace(extend, prefix_lens=(0,) * 4, extend_lens=(9, 1, 3, 6), window=4)
    yield "split-prefill", dataclasses.replace(extend, extend_lens=(9, 1, 1, 1))
    yield "split-prefill", dataclasses.replace(extend, extend_lens=(9, 1, 1, 1), window=5)
    scaled = dataclasses.replace(extend, k_scale=0.5, v_scale=2.0)
    yield "layer-scales", scaled
    for model, kv in shape.fp8[:1]:
        yield "layer-scales", dataclasses.replace(scaled, dtype=model, kv_dtype=kv)
    tree = shape.case(mode="verify", prefix_lens=(9, 4, 0), extend_lens=(4, 4, 4), mask="tree", seed=59)
    yield "verify-mask", tree
    yield "verify-mask", dataclasses.replace(tree, extend_lens=(5, 3, 6))
    yield "verify-mask", dataclasses.replace(tree, prefix_lens=(70, 40, 0))
