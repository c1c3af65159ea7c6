"""What a layer and a step must have in common beyond shapes, checked before anything is stored."""

from __future__ import annotations

import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import PlanGroup, Space
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.core.spec import AttentionKind
from anyattn.core.strategy import Strategy
from anyattn.errors import BatchError, PlanError

__all__ = [
    "another_plan",
    "check_no_prefix",
    "check_owns_kv",
    "check_pool_is_listed",
    "check_storage",
    "no_slots",
]


def another_plan(plan: Plan, batch: ForwardBatch, name: str) -> PlanError:
    """What is raised where the context's plan isn't this batch's on backend `name`."""
    key = plan.key
    other = "another batch" if key.serial != batch.serial else "another backend"
    return PlanError(
        f"the plan in the forward context was made for {other}",
        asked=f"batch {batch.serial} on {name}",
        allowed=f"batch {key.serial} ({key.mode.value}, {key.num_tokens} tokens)",
        hint="call init_forward_metadata for this batch and enter forward_context with its plan",
    )


def no_slots(loc: torch.Tensor | None, k: torch.Tensor, group: PlanGroup) -> BatchError:
    """What is raised where a step has no slots for the keys of a layer, or other ones."""
    name = "encoder_out_cache_loc" if group.table.space is Space.ENCODER else "out_cache_loc"
    return BatchError(
        f"{name} has no slots for these keys",
        asked=k.shape[0],
        allowed=0 if loc is None else loc.shape[0],
        hint=f"give {name}, or pass save_kv_cache=False",
    )


def check_storage(pool: KVPool, layer: AttentionLayer) -> None:
    """The pool holds this layer's KV in this layer's shape.

    Raises:
        PoolError: a layer number beyond the model. PlanError: another shape.
    """
    stored = pool.specs[pool.storage_layer(layer.layer_id)]
    have = (stored.num_kv_heads, stored.head_dim, stored.v_head_dim)
    want = (layer.spec.num_kv_heads, layer.spec.head_dim, layer.spec.v_head_dim)
    if have != want:
        raise PlanError(
            f"layer {layer.layer_id} has another KV shape than the pool holds for it (Hkv, D, Dv)",
            asked=want,
            allowed=have,
            hint="layer_id counts the specs given to select(), in their order",
        )


def check_owns_kv(layer: AttentionLayer) -> None:
    """Keys for a layer that reads another's would be dropped. Raises `BatchError`."""
    owner = layer.spec.kv_shared_with
    if owner is not None:
        raise BatchError(
            f"layer {layer.layer_id} shares the KV of layer {owner}",
            asked="k and v",
            allowed="None for both",
            hint="call it without k and v: its keys are in the pool already",
        )


def check_no_prefix(plan: Plan) -> None:
    """Encoder-only layers attend within the step: a cached prefix would be dropped. Raises `BatchError`."""
    if plan.host_seq_lens != plan.host_extend_lens:
        raise BatchError(
            "an encoder-only layer attends within the step and reads no cached prefix",
            asked=f"seq_lens {plan.host_seq_lens}, extend_lens {plan.host_extend_lens}",
            allowed="prefix_lens of 0",
            hint="give all tokens of a request in one step",
        )


def check_pool_is_listed(plan: Plan, layer: AttentionLayer) -> None:
    """A call without k and v reads this step's keys through the table, which must list them.

    Raises:
        BatchError: an encoder-only layer, which caches nothing. PlanError: a step planned without the pool.
    """
    if layer.spec.kind is AttentionKind.ENCODER_ONLY:
        raise BatchError(
            "an encoder-only layer caches nothing", asked=None, allowed="tensors", hint="pass k and v"
        )
    if plan.strategy is not Strategy.PAGED and layer.spec.kind is not AttentionKind.CROSS:
        raise PlanError(
            f"layer {layer.layer_id} reads everything from the pool, but the step was planned without it",
            asked="k=None, v=None",
            allowed=f"k and v of this step (plan.strategy is {plan.strategy.value})",
            hint="pass k and v, plan batch.view(kv_stored=True), or give the layer's spec kv_shared_with",
        )
