"""The axes that cases vary along, their values for a backend, what may stand together, and rows as cases."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.core.capabilities import Feature, Phase
from anyattn.testing.cases import KV_SOURCES, MODES, SLOT_LAYOUTS, Case
from anyattn.testing.declared import Declared
from anyattn.testing.lengths import LENGTHS, draw_lengths
from anyattn.testing.pairwise import Feasible, Row

__all__ = ["FULL", "QUICK", "Sizes", "axes_of", "case_of", "feasible_for"]


@dataclass(frozen=True)
class Sizes:
    """Values of the axes that cost time, before the backend's declaration is applied.

    Attributes:
        max_context: KV tokens of a request. batches: requests of a step.
    """

    pages: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[tuple[int, int], ...]
    windows: tuple[int | None, ...]
    batches: tuple[int, ...]
    max_context: int


QUICK = Sizes(
    pages=(1, 4, 6, 16, 64),
    heads=((1, 1), (2, 1), (3, 1), (4, 4), (4, 2), (8, 2)),
    head_dims=((8, 8), (16, 16), (24, 8), (16, 32), (64, 64), (80, 80)),
    windows=(None, 1, 5, 17),
    batches=(1, 2, 3),
    max_context=72,
)
"""Small shapes: seconds on one CPU core."""

FULL = Sizes(
    pages=(1, 6, 16, 32, 64, 128, 256),
    heads=((32, 8), (8, 1), (9, 3), (4, 4), (28, 4), (64, 1), (72, 1), (16, 2)),
    head_dims=((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128),
               (64, 32)),
    windows=(None, 1, 5, 64, 100),
    batches=(1, 2, 5, 9),
    max_context=513,
)  # fmt: skip
"""Shapes of real models, for an accelerator."""

Rule = tuple[tuple[str, ...], Callable[..., bool]]

_MODES_OF: dict[str, tuple[str, ...]] = {
    "bidirectional": ("extend",),
    "encoder_only": ("extend",),
    "cross": ("extend", "decode"),
}
_MODES_OF_MASK: dict[str | None, tuple[str, ...]] = {"tree": ("verify",), "random": ("verify", "extend")}
_RULES: tuple[Rule, ...] = (
    (("kind", "mode"), lambda k, m: m in _MODES_OF.get(k, MODES)),
    (("kind", "kv"), lambda k, kv: (kv == "arguments") if k == "encoder_only" else True),
    (("kind", "mode", "kv"), lambda k, m, kv: kv == "cached" or not (k == "cross" and m == "decode")),
    (("kind", "window"), lambda k, w: w is None or k != "cross"),
    (("kind", "mask"), lambda k, mask: mask is None or k != "cross"),
    (("mode", "mask"), lambda m, mask: m in _MODES_OF_MASK.get(mask, MODES)),
    (("mode", "padding"), lambda m, p: not p or m in ("decode", "extend")),
    (("kind", "padding"), lambda k, p: not p or k == "causal"),
    (("mode", "lengths"), lambda m, n: n not in ("fresh", "long_query") or m in ("extend", "mixed")),
    (("kind", "lengths"), lambda k, n: n == "fresh" or k != "encoder_only"),
    (("window", "lengths"), lambda w, n: n != "window" or w is not None),
    (("page", "lengths"), lambda p, n: n != "page" or p > 1),
)
_ROW_AXES = ("dtypes", "heads", "head_dims", "layout", "page", "window", "cap", "sinks", "lse", "mask",
             "scale", "kv_scale", "kind")  # fmt: skip


def axes_of(declared: Declared, sizes: Sizes) -> dict[str, list[Any]]:
    """Axis -> values that the backend declares in some row."""
    rows = declared.rows
    listed = sorted({p for row in rows for p in row.pages.sizes})
    pairs = list(dict.fromkeys(pair for row in rows for pair in row.head_dims.pairs))
    dtypes = list(dict.fromkeys((d, kv) for row in rows for d in row.dtypes for kv in row.kv_dtypes))
    wanted: dict[str, Sequence[Any]] = {
        "mode": [m for m in MODES if _mode_served(declared, m)],
        "kind": ("causal", "bidirectional", "encoder_only", "cross"),
        "lengths": LENGTHS,
        "slots": SLOT_LAYOUTS,
        "page": (*sizes.pages, *(p for p in listed if p not in sizes.pages)),
        "layout": list(dict.fromkeys(layout for row in rows for layout in row.layouts)),
        "heads": (*sizes.heads, *_listed_heads(declared, sizes)),
        "head_dims": (*sizes.head_dims, *(p for p in pairs if p not in sizes.head_dims)),
        "dtypes": dtypes,
        "window": sizes.windows,
        "cap": (None, 1.5, 30.0),
        "sinks": (False, True),
        "scale": (None, 0.3),
        "kv_scale": ("one", "tensor", "head"),
        "mask": (None, "tree", "random"),
        "kv": KV_SOURCES,
        "lse": (True, False),
        "strided": (False, True),
        "flat": (False, True),
        "out": (False, True),
        "host": ("lists", "device"),
        "padding": (0, 2),
        "batch": sizes.batches,
    }
    return {name: [v for v in values if _declared(declared, name, v)] for name, values in wanted.items()}


def _mode_served(declared: Declared, mode: str) -> bool:
    return all(phase in declared.phases for phase in declared.needed(mode))


def _declared(declared: Declared, axis: str, value: Any) -> bool:
    return axis not in _ROW_AXES or any(declared.allows(row, axis, value) for row in declared.rows)


_MANY = 16
"""A row that lists more group sizes than this means a range."""


def _telling(sizes: Sequence[int]) -> list[int]:
    """Sizes themselves; of a range its ends, and those next to powers of two, where tiles change."""
    if len(sizes) <= _MANY:
        return list(sizes)
    listed = set(sizes)
    near = {power + step for power in (1 << n for n in range(16)) for step in (-1, 0, 1)}
    return [g for g in sizes if g in near or not {g - 1, g + 1} <= listed]


def _listed_heads(declared: Declared, sizes: Sizes) -> list[tuple[int, int]]:
    """One pair of head counts for each group size or count that a row lists."""
    found = {(g, 1) for row in declared.rows for g in _telling(row.group_sizes)}
    found |= {(q, max(1, q // 8)) for row in declared.rows for q in row.q_heads}
    return sorted(pair for pair in found if pair not in sizes.heads and pair[0] % pair[1] == 0)


def feasible_for(declared: Declared, axes: Mapping[str, Sequence[Any]]) -> Feasible:
    """Rules between axes, and one row in each phase that allows everything chosen so far."""
    phases = (Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.DRAFT)
    rows = {phase: declared.rows_for(phase) for phase in phases}
    bits = {
        (phase, axis, repr(value)): sum(
            declared.allows(row, axis, value) << i for i, row in enumerate(rows[phase])
        )
        for phase in phases
        for axis in _ROW_AXES
        for value in axes[axis]
    }
    unstored = {
        phase: sum((Feature.NO_CACHE_WRITE in row.features) << i for i, row in enumerate(rows[phase]))
        for phase in phases
    }

    def feasible(row: Mapping[str, Any]) -> bool:
        for names, rule in _RULES:
            if all(name in row for name in names) and not rule(*(row[name] for name in names)):
                return False
        for phase in declared.needed(row.get("mode", "extend")):
            left = (1 << len(rows[phase])) - 1
            for axis in _ROW_AXES:
                if axis in row:
                    left &= bits[phase, axis, repr(row[axis])]
            if row.get("kv") == "arguments" and row.get("kind", "encoder_only") != "encoder_only":
                left &= unstored[phase]
            if not left:
                return False
        return True

    return feasible


def case_of(row: Row, seed: int | str, max_context: int) -> Case:
    """A case with the row's values; lengths, scales and data are drawn from `seed`."""
    rng = random.Random(f"{seed}/{sorted(row.items(), key=lambda item: item[0])!r}")
    count = row["batch"]
    prefix, extend, num_decode = draw_lengths(
        rng, row["lengths"], row["mode"], count, row["page"], row["window"], max_context
    )
    if row["kind"] == "encoder_only":
        prefix = (0,) * count
    encoder = tuple(rng.choice((0, 1, row["page"], rng.randint(1, max_context))) for _ in range(count))
    (num_q, num_kv), (dim, v_dim), (dtype, kv_dtype) = row["heads"], row["head_dims"], row["dtypes"]
    return Case(
        mode=row["mode"],
        kind=row["kind"],
        prefix_lens=prefix,
        extend_lens=extend,
        num_decode=num_decode,
        encoder_lens=encoder if row["kind"] == "cross" else None,
        page_size=row["page"],
        layout=row["layout"],
        slot_layout=row["slots"],
        num_q_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=row["window"],
        logit_cap=row["cap"],
        sinks=row["sinks"],
        scale=row["scale"],
        k_scale=_scale(rng, row["kv_scale"], num_kv),
        v_scale=_scale(rng, row["kv_scale"], num_kv),
        mask=row["mask"],
        strided=row["strided"],
        flat=row["flat"],
        give_out=row["out"],
        return_lse=row["lse"],
        kv=row["kv"],
        device_ints=row["host"] == "device",
        padding=row["padding"],
        seed=rng.randrange(2**31),
    )


def _scale(rng: random.Random, how: str, heads: int) -> float | tuple[float, ...]:
    if how == "one":
        return 1.0
    values = (0.5, 2.0, 0.25)
    return rng.choice(values) if how == "tensor" else tuple(rng.choice(values) for _ in range(heads))
