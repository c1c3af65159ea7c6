"""Checks of refusals: undeclared features, layers wider than planned, plans of other batches.

Refused means: a typed error that names it, before anything is stored or computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import anyattn
from anyattn.core.capabilities import Feature, Phase
from anyattn.core.select.decision import Decision, PhaseChoice
from anyattn.errors import AnyattnError, FeatureError, PlanError, SelectionError
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Subject, gathered
from anyattn.testing.judge import judge, run_step
from anyattn.testing.selecting import select_for
from anyattn.testing.world import World

__all__ = ["head_counts", "other_plan", "over_wide_layer", "undeclared_feature"]

_USES: dict[Feature, Callable[[Case], Case]] = {
    Feature.WINDOW: lambda c: dataclasses.replace(c, window=3),
    Feature.LOGIT_CAP: lambda c: dataclasses.replace(c, logit_cap=2.0),
    Feature.SINKS: lambda c: dataclasses.replace(c, sinks=True),
    Feature.LSE: lambda c: dataclasses.replace(c, return_lse=True),
    Feature.EXPLICIT_MASK: lambda c: dataclasses.replace(c, mask="random"),
    Feature.BIDIRECTIONAL: lambda c: dataclasses.replace(c, kind="bidirectional"),
    Feature.ENCODER_ONLY: lambda c: dataclasses.replace(
        c, kind="encoder_only", kv="arguments", prefix_lens=(0,) * c.batch_size
    ),
    Feature.CROSS: lambda c: dataclasses.replace(c, kind="cross", encoder_lens=(4,) * c.batch_size),
    Feature.CUSTOM_SCALE: lambda c: dataclasses.replace(c, scale=0.3),
    Feature.NO_CACHE_WRITE: lambda c: dataclasses.replace(c, kv="arguments"),
}
"""How a case asks for a feature in its call."""

_INPUTS = {
    Feature.Q_ROPE: "q_rope",
    Feature.TOPK_INDICES: "topk_indices",
    Feature.INDEXER: "idx_q",
}


def undeclared_feature(subject: Subject, case: Case) -> Outcome:
    """Each feature that no row declares is refused by `select`; each at the call, once its row lacks it."""
    faults = []
    for feature in Feature:
        if not subject.declared.declares(feature):
            faults += _selected(subject, case, feature)
    for feature, use in _USES.items():
        asking = use(case)
        if subject.declared.refusal(asking) is None:
            faults += _called(subject, asking, feature)
    for feature, field in _INPUTS.items():
        if not subject.declared.declares(feature):
            faults += _passed_along(subject, case, feature, field)
    return Outcome(faults=tuple(faults))


def _selected(subject: Subject, case: Case, feature: Feature) -> list[str]:
    try:
        select_for(
            [case.spec()], dtype=case.dtype, device=subject.device, host=subject.host,
            backend=subject.declared.name, features=[feature],
        )  # fmt: skip
    except SelectionError as error:
        return [] if feature.value in str(error) else [f"select() refuses {feature.value} without naming it"]
    return [f"select() takes {feature.value}, which no row declares"]


def _called(subject: Subject, case: Case, feature: Feature) -> list[str]:
    """A backend whose rows lack the feature, asked for it by a layer or a call."""
    world = subject.world(case)
    world.backend = anyattn.create_backend(_without(world.decision, feature), world.pool, world.table)
    step = build_step(world)
    return _refused(world, step, FeatureError, feature.value, lambda: run_step(step))


def _without(decision: Decision, feature: Feature) -> Decision:
    def restricted(choice: PhaseChoice) -> PhaseChoice:
        features = tuple(f for f in choice.row.features if f is not feature)
        return dataclasses.replace(choice, row=dataclasses.replace(choice.row, features=features))

    phases = [p.value for p in Phase if getattr(decision, p.value) is not None]
    changed: dict[str, Any] = {p: restricted(getattr(decision, p)) for p in phases}
    return dataclasses.replace(decision, **changed)


def _passed_along(subject: Subject, case: Case, feature: Feature, field: str) -> list[str]:
    world = subject.world(case)
    step = build_step(world)
    inputs = anyattn.LayerInputs(**{field: step.q})

    def call() -> None:
        plan = world.backend.init_forward_metadata(step.batch)
        with anyattn.forward_context(world.backend, plan):
            world.layer(step.q, step.k, step.v, step.batch, inputs=inputs)

    return _refused(world, step, FeatureError, feature.value, call)


def _refused(
    world: World, step: Step, kind: type[AnyattnError], word: str, call: Callable[[], object]
) -> list[str]:
    """Faults unless `call` raises `kind` with `word` in it and leaves the pool as it was."""
    caches = world.pool.key_cache(world.layer_id), world.pool.value_cache(world.layer_id)
    before = [c.view(torch.uint8).clone() for c in caches]
    faults = []
    try:
        call()
    except kind as error:
        if word not in str(error):
            faults.append(f"refused without naming {word}: {error}")
    except AnyattnError as error:
        faults.append(f"{word} is refused as something else: {type(error).__name__}: {error}")
    else:
        faults.append(f"{word} is not declared, and not refused")
    if any(not torch.equal(a, c.view(torch.uint8)) for a, c in zip(before, caches, strict=True)):
        faults.append(f"the pool was written to before {word} was refused")
    return faults


def head_counts(subject: Subject, case: Case) -> Outcome:
    """Layers of one plan group with few and with many query heads: planned for the most, each is right."""
    narrow = dataclasses.replace(case, num_q_heads=case.num_kv_heads)
    reports = []
    for specs in ([narrow, case], [case, narrow]):
        for layer_id, own in enumerate(specs):
            world = subject.world(own, specs=[s.spec() for s in specs], layer_id=layer_id)
            name = f"{own.num_q_heads} query heads, layer {layer_id} of two"
            reports.append((name, judge(run_step(build_step(world)))))
    return gathered(reports)


def over_wide_layer(subject: Subject, case: Case) -> Outcome:
    """A layer with more query heads than the plan was made for is refused before it runs."""
    world = subject.world(case)
    step = build_step(world)
    wide = dataclasses.replace(case, num_q_heads=2 * case.num_q_heads)
    layer = anyattn.AttentionLayer(wide.spec(), 0).to(world.device)
    q = step.q.repeat(1, 2, 1)

    def call() -> None:
        plan = world.backend.init_forward_metadata(step.batch)
        with anyattn.forward_context(world.backend, plan):
            layer(q, step.k, step.v, step.batch)

    return Outcome(faults=tuple(_refused(world, step, PlanError, "query heads", call)))


def other_plan(subject: Subject, case: Case) -> Outcome:
    """The plan of another batch, of the same shape, is refused."""
    world = subject.world(case)
    step = build_step(world)
    stale = world.backend.init_forward_metadata(step.batch)
    step.batch = step.batch.view()
    return Outcome(
        faults=tuple(_refused(world, step, PlanError, "another batch", lambda: run_step(step, stale)))
    )
