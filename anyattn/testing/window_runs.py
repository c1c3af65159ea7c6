"""Lives of requests on models with windows: what a dual pool has to get right, as runs of `Served`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import anyattn
from anyattn.core.spec import AttentionKind
from anyattn.testing.windows import Served, tree_of

__all__ = ["RUNS", "spec"]


def spec(window: int | None, **fields: Any) -> anyattn.AttentionSpec:
    """A small layer: 4 query heads on 2 KV heads of 16, unless said otherwise."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | fields
    return anyattn.AttentionSpec(sliding_window=window, **shape)


def long_prompt(**options: Any) -> tuple[float, Served]:
    """A prompt far longer than the window in one step without a prefix, then decode, then a chunk on top."""
    served = Served([spec(None), spec(8)], max_context=96, **options)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 37, two: 9})
    for _ in range(11):
        worst = max(worst, served.step({one: 1, two: 1}, mode="decode"))
    return max(worst, served.step({one: 21, two: 3})), served


def edges(**options: Any) -> tuple[float, Served]:
    """Lengths around the window and around pages, one token at a time from a short prompt."""
    served = Served([spec(6), spec(None), spec(6)], max_context=48, **options)
    one, two, three = served.admit(), served.admit(), served.admit()
    worst = served.step({one: 5, two: 6, three: 7})
    for _ in range(14):
        worst = max(worst, served.step({one: 1, two: 1, three: 1}, mode="decode"))
    return worst, served


def chunks(**options: Any) -> tuple[float, Served]:
    """Chunked prefill of several requests, decode rows in between, requests that end and begin."""
    served = Served([spec(9), spec(None)], max_context=80, max_step=24, seed=3, **options)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 13})
    worst = max(worst, served.step({two: 17, one: 1}, mode="mixed"))
    worst = max(worst, served.step({two: 16, one: 1}, mode="mixed"))
    served.finish(one)
    three = served.admit()
    worst = max(worst, served.step({three: 20, two: 1}, mode="mixed"))
    for _ in range(6):
        worst = max(worst, served.step({two: 1, three: 1}, mode="decode"))
    return worst, served


def several_sizes(**options: Any) -> tuple[float, Served]:
    """Three window sizes and full layers in one model; sinks, cap, shared KV, two-sided attention."""
    layers = [
        spec(None), spec(4), spec(11, sinks=True), spec(11, kv_shared_with=2), spec(4, logit_cap=5.0),
        spec(11, kind=AttentionKind.BIDIRECTIONAL), spec(7, num_q_heads=6, num_kv_heads=1, head_dim=32),
    ]  # fmt: skip
    served = Served(layers, max_context=64, **options)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 19, two: 2})
    for _ in range(9):
        worst = max(worst, served.step({one: 1, two: 1}, mode="decode"))
    return max(worst, served.step({one: 1, two: 14})), served


def trees(**options: Any) -> tuple[float, Served]:
    """Drafts as trees on top of a prefix longer than the window; the accepted tokens come after."""
    served = Served([spec(6), spec(None)], max_context=64, **options)
    rng = random.Random(5)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 17, two: 4})
    for _ in range(3):
        tree = {one: tree_of(7, rng), two: tree_of(7, rng)}
        worst = max(worst, served.step({one: 7, two: 7}, tree=tree, keep=False))
        worst = max(worst, served.step({one: 2, two: 3}))
    return worst, served


RUNS: Mapping[str, Callable[..., tuple[float, Served]]] = {
    run.__name__: run for run in (long_prompt, edges, chunks, several_sizes, trees)
}
"""All runs by name; each takes the keywords of `Served` and returns the worst error and the world."""
