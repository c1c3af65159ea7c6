"""The pool that a decision asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from anyattn.core.arguments import check_whole
from anyattn.core.dtypes import torch_dtype
from anyattn.core.kv.pools.mha import LAYOUTS, MHAPool
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.kv.pools.mla_split import SPLIT_LAYOUTS, SplitMLAPool
from anyattn.core.kv.pools.packed import PackedPool
from anyattn.core.kv.pools.unified import UnifiedPool
from anyattn.core.kv.pools.window import WindowPool
from anyattn.core.registry import load_target
from anyattn.errors import PoolError

if TYPE_CHECKING:
    from anyattn.core.select.decision import Decision

__all__ = ["create_pool"]


def create_pool(
    decision: Decision,
    *,
    num_slots: int,
    window_slots: int | Mapping[int, int] | None = None,
    num_ids: int | None = None,
    k_scale: float | Sequence[float] = 1.0,
    v_scale: float | Sequence[float] = 1.0,
) -> MHAPool | MLAPool | PackedPool:
    """KV storage for every layer of `decision.request`, on its device, in its page size and layout.

    A layout that only its own library writes is a `PackedPool`: the decided backend's class says how.

    Args:
        num_slots: usable token slots, a multiple of `decision.kv.page_size` (page 0 comes on top).
        window_slots: give the layers of each window size (or of those named) a smaller pool of their own with
            so many usable slots (`WindowPool`; `window_slots_for`); None = one pool for all layers.
        num_ids: list virtual ids, so many, over pools of physical slots (`UnifiedPool`).
        k_scale, v_scale: stored = sat(x / scale); one number, or one per KV head. Latents have one scale,
            `k_scale`.

    Raises:
        PoolError: sizes or scales that can't be; a layout without a pool class.
    """
    if not hasattr(decision, "kv"):
        raise PoolError(
            "decision of the pool",
            asked=type(decision).__name__,
            allowed="Decision",
            hint="anyattn.select(...)",
        )
    check_whole("num_slots counts tokens", num_slots, 1, error=PoolError)
    known = dict.fromkeys((*LAYOUTS, *SPLIT_LAYOUTS))
    try:
        if decision.kv.layout not in known:
            return _packed_pool(decision, num_slots, (window_slots, num_ids, k_scale, v_scale), list(known))
        return _pool(decision, num_slots, window_slots, num_ids, k_scale, v_scale)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise PoolError(
            "the device has no memory for the pool",
            asked=f"{num_slots} slots in each of {len(decision.request.specs)} layers",
            allowed="what is free",
            hint="fewer num_slots, or a smaller kv_dtype in select()",
        ) from error


def _pool(
    decision: Decision,
    num_slots: int,
    window_slots: int | Mapping[int, int] | None,
    num_ids: int | None,
    k_scale: float | Sequence[float],
    v_scale: float | Sequence[float],
) -> MHAPool | MLAPool:
    if any(spec.mla is not None for spec in decision.request.specs):
        if window_slots is not None or num_ids is not None:
            raise PoolError(
                "latent KV has one pool (window_slots, num_ids)",
                asked=(window_slots, num_ids),
                allowed="None",
            )
        return _latent_pool(decision, num_slots, k_scale, v_scale)
    build: Callable[..., MHAPool] = MHAPool
    if num_ids is not None:
        build = partial(UnifiedPool, window_slots=window_slots, num_ids=num_ids)
    elif window_slots is not None:
        build = partial(WindowPool, window_slots=window_slots)
    return build(
        decision.request.specs,
        num_slots=num_slots,
        page_size=decision.kv.page_size,
        layout=decision.kv.layout,
        kv_dtype=torch_dtype(decision.kv.dtype),
        dtype=torch_dtype(decision.request.dtype),
        device=decision.request.device,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _packed_pool(
    decision: Decision, num_slots: int, options: tuple[object, ...], known: list[str]
) -> PackedPool:
    """In the format of the decided backend's class, which `packed_format(layout, dtype)` of it makes."""
    choice, layout = decision.decode, decision.kv.layout
    adapter = None if choice.target is None else load_target(choice.target, choice.backend)
    packed_format = getattr(adapter, "packed_format", None)
    if packed_format is None:
        raise PoolError("no pool for this layout", asked=layout, allowed=", ".join(known))
    if options != (None, None, 1.0, 1.0):
        raise PoolError(
            f"a pool in {choice.backend}'s own format (window_slots, num_ids, k_scale, v_scale)",
            asked=options,
            allowed="none of them",
            hint="leave them out, or select another backend",
        )
    dtype = torch_dtype(decision.request.dtype)
    return PackedPool(
        decision.request.specs, packed_format(layout, dtype), num_slots=num_slots,
        page_size=decision.kv.page_size, dtype=dtype, device=decision.request.device,
    )  # fmt: skip


def _latent_pool(
    decision: Decision, num_slots: int, k_scale: float | Sequence[float], v_scale: float | Sequence[float]
) -> MLAPool:
    if not isinstance(k_scale, (int, float)) or v_scale not in (1.0, k_scale):
        raise PoolError(
            "scales of a latent pool (k, v)",
            asked=(k_scale, v_scale),
            allowed="one k_scale, v_scale left out",
            hint="values are a part of the latent and share its scale",
        )
    build = SplitMLAPool if decision.kv.layout in SPLIT_LAYOUTS else MLAPool
    return build(
        decision.request.specs,
        num_slots=num_slots,
        page_size=decision.kv.page_size,
        layout=decision.kv.layout,
        kv_dtype=torch_dtype(decision.kv.dtype),
        dtype=torch_dtype(decision.request.dtype),
        device=decision.request.device,
        scale=k_scale,
    )
