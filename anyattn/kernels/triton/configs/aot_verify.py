"""Entries of verify steps (a few query tokens on cut keys) for ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from anyattn.kernels.triton.aot import TARGETS, Entry, Target
from anyattn.kernels.triton.configs.aot_attention import (
    FP8_TARGETS,
    RDNA3_WIDE_HEADS,
    Shape,
    cache_of,
    empty,
    variant_of,
)
from anyattn.kernels.triton.configs.choose_verify import choose_few, choose_verify
from anyattn.kernels.triton.verify_launch import DRAFTS, VerifyMasks, VerifyStep, fill_verify, verify

__all__ = ["ENTRIES", "MORE", "verify_layer"]

_KEYS = 2048
"""So many may be cut everywhere."""


def verify_layer(shape: Shape, target: Target, *, among: bool = False) -> None:
    """Verify and its merge: `new` tokens a request, its own from k and v where the shape is `direct`.

    `among`: other requests have more tokens.
    """
    heads, rows, tokens = shape.heads, shape.batch, shape.batch * shape.new
    cache = cache_of(shape, target)
    itemsize, kv_itemsize = max(shape.dtype.itemsize, cache.k.dtype.itemsize), cache.k.dtype.itemsize
    keys, dim, arch = max(_KEYS, shape.context), max(heads.dim, heads.v_dim), target.name.replace("_", "")
    if among:
        tiles = choose_few(
            rows, heads.num_kv, heads.group, keys, dim, itemsize, arch, 132, kv_itemsize=kv_itemsize
        )
    else:
        tiles = choose_verify(
            rows, heads.num_kv, heads.group, shape.new, keys, dim, itemsize, arch, 1 << 20, even=rows == 1,
            kv_itemsize=kv_itemsize, run=shape.page,
        )  # fmt: skip
    assert tiles is not None
    masks = VerifyMasks()
    if shape.mask:
        masks = VerifyMasks(
            DRAFTS, empty(tokens * shape.context, dtype=torch.bool), empty(rows + 1, dtype=torch.int64),
            empty(tokens, dtype=torch.int64),
        )  # fmt: skip
    step = VerifyStep.of(
        empty(257, 32768), empty(rows, dtype=torch.int64), empty(rows), empty(rows), empty(rows + 1),
        empty(rows), shape.page, heads, tiles, masks, among=among,
    )  # fmt: skip
    fill_verify(step)
    new = (heads.num_kv, heads.dim), (heads.num_kv, heads.v_dim)
    k, v = (empty(tokens, *each, dtype=shape.dtype) for each in new) if shape.direct else (None, None)
    verify(
        empty(tokens, heads.num_q, heads.dim, dtype=shape.dtype), k, v, cache, step, variant_of(shape),
        empty(tokens, heads.num_q, heads.v_dim, dtype=shape.dtype),
        empty(tokens, heads.num_q, dtype=torch.float32) if shape.lse else None,
    )  # fmt: skip


def _entry(
    name: str, shape: Shape, kernel: str = "verify_kernel", *, targets: Sequence[str] | None = None,
    among: bool = False, spills: Mapping[str, str] | None = None,
) -> Entry:  # fmt: skip
    chips = targets or (FP8_TARGETS if shape.fp8 else tuple(TARGETS))
    main = kernel == "verify_kernel"
    reads = 1 if shape.fp8 else shape.dtype.itemsize
    return Entry(
        name, partial(verify_layer, shape, among=among), chips, kernel,
        main and shape.dtype is not torch.float32, spills or {}, reads if main else 0,
    )  # fmt: skip


_CHAIN = Shape(batch=1, new=16, direct=False)
_TREE = Shape(batch=16, new=8, direct=False, mask=True)
_WINDOW = Shape(q_heads=64, dim=64, batch=4, new=4, direct=False, window=128, sinks=True, cap=30.0, lse=True)
_BETWEEN = {"sm_90": "a few registers of what is needed between requests alone, none in the loop over tiles"}

ENTRIES: tuple[Entry, ...] = (
    _entry("verify/d128-one-request", _CHAIN),
    _entry("verify/d128-tree", _TREE),
    _entry("verify/d64-window-sinks", _WINDOW),
    _entry("verify/d128-fp8", Shape(batch=16, new=4, fp8=True), spills=_BETWEEN),
    _entry("verify/d256", replace(_CHAIN, q_heads=16, dim=256, batch=4, new=4), spills=RDNA3_WIDE_HEADS),
    _entry("merge-verify/d128", _CHAIN, "merge_verify_kernel"),
)
"""Chains and trees, the two ways of cutting, one of each feature."""

MORE: tuple[Entry, ...] = (
    _entry("few-keys/128-requests", replace(_CHAIN, batch=128), "few_keys_kernel", among=True),
    _entry("verify/d128-few-among-many", replace(_CHAIN, batch=128), among=True, spills=_BETWEEN),
    _entry("verify/d128-walk", replace(_CHAIN, batch=16), spills=_BETWEEN),
    _entry("verify/d128-16-rows", replace(_CHAIN, batch=32, new=4)),
    _entry("verify/d128-tree-in-a-window", replace(_TREE, window=4096), spills=_BETWEEN),
    _entry("verify/d128-float32", replace(_CHAIN, dtype=torch.float32)),
)
"""On demand, when tiles change: `--configs anyattn.kernels.triton.configs.aot_verify:MORE`."""
