"""What a prefill in segments may not have, by name; and the stand-ins that its capture shows to a model."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.layer import AttentionLayer
from anyattn.core.mla import MLAMethod
from anyattn.core.plan import PlanKey
from anyattn.core.spec import AttentionKind
from anyattn.core.traits import Traits
from anyattn.errors import GraphError

__all__ = ["CapturedBatch", "CapturedPlan", "check_backend", "check_call", "check_inputs", "check_step"]


class CapturedBatch:
    """The batch that a body sees while its segments are captured: a number of rows, and no values.

    One set of segments serves every mode and every number of requests, so that nothing else is the same in
    all of its replays.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        raise _frozen("batch", name)


class CapturedPlan:
    """The plan of the forward context while segments are captured without metadata of their own."""

    def __init__(self, batch: CapturedBatch, mla_method: MLAMethod | None) -> None:
        self.batch, self.mla_method = batch, mla_method
        self.key = PlanKey(0, 0, ForwardMode.EXTEND, 0, batch.num_tokens)

    def __getattr__(self, name: str) -> Any:
        raise _frozen("plan", name)


def _frozen(what: str, name: str) -> Exception:
    if name.startswith("__"):  # what Python and torch look for on any object
        return AttributeError(name)
    return GraphError(
        f"a captured segment can't read {what}.{name}: it would keep the value that the capture saw",
        asked=f"{what}.{name}",
        allowed=f"{what}.num_tokens, the bucket's rows" if what == "batch" else "attention layers",
        hint="give it as an input of the runner, or read current_context().plan with captured_metadata=True",
    )


def check_backend(backend: Any, traits: Traits, mode: ForwardMode) -> MLAMethod | None:
    """The method that latent layers are captured with (None: no latent layers).

    Raises:
        GraphError: a backend that can't run between graphs, or one that chooses between methods every step.
    """
    serving = backend.child(mode) if hasattr(backend, "child") else backend
    name = serving.config.name
    if not traits.eager_between_graphs:
        raise GraphError(
            f"{name} doesn't run between captured segments in {mode.value}",
            asked=f"{mode.value} in breakable graphs",
            allowed="backends whose traits say eager_between_graphs",
            hint="run this mode eagerly, or choose another backend: select(prefill=…)",
        )
    if all(spec.mla is None for spec in serving.pool.specs):
        return None
    if serving.mla.policy.method is not MLAMethod.ABSORBED:
        chosen = serving.mla.policy.method
        raise GraphError(
            "latent layers in segments need one method for every step",
            asked="a method chosen each step" if chosen is None else chosen.value,
            allowed=MLAMethod.ABSORBED.value,
            hint="create_backend(…, mla=MLAPolicy(method=MLAMethod.ABSORBED)), or prefill eagerly",
        )
    return MLAMethod.ABSORBED


def check_call(q: torch.Tensor, k: torch.Tensor | None, layer: AttentionLayer, rows: int) -> None:
    """Raises `GraphError` for a call that has other rows than the bucket, or stores encoder KV."""
    if q.shape[0] != rows:
        raise GraphError(
            f"layer {layer.layer_id} is called with a part of the bucket's rows",
            asked=q.shape[0],
            allowed=rows,
            hint="select rows behind the last attention layer, or outside the graphs",
        )
    if layer.spec.kind is AttentionKind.CROSS and k is not None:
        raise GraphError(
            f"layer {layer.layer_id} stores the encoder's KV between segments",
            asked="k and v of encoder tokens",
            allowed="None for both: KV that is stored already",
            hint="store the encoder's KV in an eager step",
        )


def check_step(batch: ForwardBatch) -> None:
    """Raises `GraphError` for an empty step, or one whose layers run in ranges."""
    if batch.num_tokens == 0:
        raise GraphError(
            "an empty step", asked=batch.forward_mode.value, allowed="one token or more", hint="run nothing"
        )
    if batch.forward_mode is ForwardMode.SPLIT_PREFILL:
        raise GraphError(
            "a split prefill runs its layers in ranges; captured segments run all of them",
            asked=batch.forward_mode.value,
            allowed="whole steps",
            hint="run it eagerly",
        )


def check_inputs(known: dict[str, torch.Tensor], given: dict[str, torch.Tensor], tokens: int) -> None:
    """Raises `GraphError` for an input that has no static buffer, or other rows than the step's tokens."""
    for name, value in given.items():
        if name not in known:
            raise GraphError(
                "an input without a static buffer",
                asked=name,
                allowed=", ".join(known) or "none",
                hint=f"runner = BreakableRunner(…, inputs={{{name!r}: buffer}})",
            )
        if value.shape[0] != tokens or value.shape[1:] != known[name].shape[1:]:
            raise GraphError(
                f"shape of input {name!r}",
                asked=list(value.shape),
                allowed=[tokens, *known[name].shape[1:]],
                hint="one row for each token of the batch",
            )
