"""The decode call of a layer as launches that were made before, repeated with other addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from anyattn.kernels.triton.attention import Cache, Heads, Variant, started_write
from anyattn.kernels.triton.decode_launch import DecodeStep, started_decode
from anyattn.kernels.triton.launch import direct_device

if TYPE_CHECKING:
    from anyattn.core.groups import PlanGroup
    from anyattn.core.plan import Plan

__all__ = ["DecodeRepeats", "Store"]

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Of `loc`, k and v."""


class DecodeRepeats:
    """One layer's new keys and values stored, and attended to with all that are cached.

    Only where the ordinary path has made the same launches before: for tensors of the same strides, whose
    addresses are aligned, on the same device, and for a step that was dealt out alike.
    """

    def __init__(
        self,
        cache: Cache,
        heads: Heads,
        variant: Variant,
        group: PlanGroup,
        dtype: torch.dtype,
        store: Store | None = None,
    ) -> None:
        """`store`: what writes new KV; None = the package's own kernel."""
        self._cache, self._heads, self._sinks = cache, heads, variant.sinks
        self._group, self._dtype, self._store = group, dtype, store
        self._strides_of_own = (heads.num_q * heads.v_dim, heads.v_dim, 1)
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        loc: torch.Tensor,
        plan: Plan,
    ) -> torch.Tensor | None:
        """`out`, or a fresh tensor in its place; None: nothing was done, take the ordinary path.

        `loc`: slots int64 of as many tokens as the plan's, one at least.
        """
        device = direct_device()
        step: DecodeStep = plan.private.decode[self._group]
        strides = self._strides_of_own if out is None else out.stride()
        key = (step.number, device, q.stride(), k.stride(), v.stride(), strides)
        known = self._known.get(key)
        if known is None:
            found = self._find(step, *key[1:])
            if found is None:
                return None
            known = self._known[key] = found
        heads, dtype, tokens = self._heads, self._dtype, plan.key.num_tokens
        num_kv, shape = heads.num_kv, (tokens, heads.num_q, heads.v_dim)
        if not (
            q.shape == (tokens, heads.num_q, heads.dim)
            and k.shape == (tokens, num_kv, heads.dim)
            and v.shape == (tokens, num_kv, heads.v_dim)
            and q.dtype is dtype
            and k.dtype is dtype
            and v.dtype is dtype
            and (out is None or (out.shape == shape and out.dtype is dtype))
        ):
            return None
        if out is None:
            out = torch.empty_like(q) if key[2] == strides else q.new_empty(shape)
        q_at, k_at, v_at, out_at, loc_at = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), loc.data_ptr()
        )  # fmt: skip
        sinks_at = None if self._sinks is None else self._sinks.data_ptr()
        if (q_at | k_at | v_at | out_at | loc_at | (sinks_at or 0)) & 15:
            return None
        write, write_front, write_last, run, front, middle, last, grid, merge = known
        stream, (own, merging) = torch._C._cuda_getCurrentRawStream(device), step.fixed
        if write is None:
            assert self._store is not None
            self._store(loc, k, v)
        else:
            write(tokens, 1, 1, stream, *write_front, k_at, v_at, loc_at, *write_last)
        run(grid, 1, 1, stream, *front, q_at, out_at, None, sinks_at, *middle, *own.values, *last)
        if merge is not None:
            run, front, middle, last, grid = merge
            run(grid, 1, 1, stream, *front, out_at, None, sinks_at, *middle, *merging.values, *last)
        return out

    def _find(self, step: DecodeStep, device: int, *strides: tuple[int, ...]) -> tuple[Any, ...] | None:
        """What the ordinary path started for a step dealt out alike and tensors of these strides."""
        heads = self._heads
        per_head = all(len(each) == 3 and each[2] == 1 for each in strides)
        if device < 0 or heads.num_q != step.heads.num_q or not per_head:
            return None
        (q_t, q_h, _), k_strides, v_strides, (out_t, out_h, _) = strides
        write: tuple[Any, ...] = (None, (), ())
        if self._store is None:
            stored = started_write(self._cache, heads, self._dtype, k_strides[:2] + v_strides[:2], device)
            if stored is None:
                return None
            write = (stored.run, stored.front, k_strides[:2] + v_strides[:2] + stored.last)
        middle = (q_t, q_h, out_t, out_h, 0)
        found = started_decode(self._cache, heads, step, self._dtype, middle, self._sinks, device)
        if found is None:
            return None
        grid, decoding, merge_grid, merges = found
        merge = None
        if merges is not None:
            merge = (merges.run, merges.front, (out_t, out_h, 0, heads.num_q), merges.last, merge_grid)
        return (*write, decoding.run, decoding.front, middle, decoding.last, grid, merge)
