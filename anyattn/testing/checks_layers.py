"""Checks of several layers under one plan: masks of table groups, scales per layer, a split prefill.

What layers share (a plan, its tables and masks, the pool) must not make one layer compute as another.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch

from anyattn.core.capabilities import Phase
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject, gathered
from anyattn.testing.judge import Report, judge, planned_in_buffers, run_step

__all__ = ["layer_masks", "layer_scales", "split_prefill"]


def _on_layer(
    step: Step, case: Case, layer_id: int, members: Sequence[int] | None = None, *, mode: str | None = None
) -> Step:
    """The same batch on another layer of the model, with inputs and expectations of its own."""
    world = copy.copy(step.world)
    world.case, world.layer_id = case, layer_id
    world.keys, world.values = (torch.full_like(x, torch.nan) for x in (world.keys, world.values))
    world.layer = world.make_layer()
    other = build_step(world, members, mode=mode)
    other.batch = step.batch
    return other


def layer_masks(subject: Subject, case: Case) -> Outcome:
    """A full and a windowed layer in one plan, either one first: each sees through its own mask."""
    reports: list[tuple[str, Report]] = []
    full = dataclasses.replace(case, window=None)
    for order in ((full, case), (case, full)):
        world = subject.world(order[0], specs=[c.spec() for c in order])
        first = build_step(world)
        steps = [first, _on_layer(first, order[1], 1)]
        plan = world.backend.init_forward_metadata(first.batch)
        for layer, step in enumerate(steps):
            name = "full" if step.world.case.window is None else "window"
            reports.append((f"{name} layer, number {layer}", judge(run_step(step, plan))))
    return gathered(reports)


def layer_scales(subject: Subject, case: Case) -> Outcome:
    """Two layers with scales of their own: what each stores, reads and names in `pool.scales`."""
    second = dataclasses.replace(case, k_scale=0.25, v_scale=3.0)
    world = subject.world(case, specs=[case.spec(), second.spec()])
    assert isinstance(world.pool, MHAPool)
    world.pool.set_scales(1, 0.25, 3.0)
    first = build_step(world)
    plan = world.backend.init_forward_metadata(first.batch)
    steps = [first, _on_layer(first, second, 1)]
    reports = [(f"scales of layer {i}", judge(run_step(step, plan))) for i, step in enumerate(steps)]
    named = tuple(scale.host for scale in world.pool.scales(1))
    faults = [] if named == ((0.25,), (3.0,)) else [f"pool.scales(1) names {named}, given (0.25, 3.0)"]
    return gathered(reports, faults)


def split_prefill(subject: Subject, case: Case) -> Outcome:
    """A prefill in two ranges of layers, decode steps of other requests in between, in a graph's buffers."""
    if not {Phase.PREFILL, Phase.DECODE} <= subject.declared.phases:
        raise Skip("needs a backend for prefill and decode")
    world = subject.world(case, specs=[case.spec()] * 2)
    limits = world.decision.request.limits
    assert limits is not None
    world.backend.init_cuda_graph_state(limits)
    first = build_step(world, [0], mode="split_prefill")
    second = _on_layer(first, case, 1, [0], mode="split_prefill")
    plan = planned_in_buffers(world.backend, first.batch)
    reports = [("split prefill, first layer", judge(run_step(first, plan)))]
    others = list(range(1, case.batch_size))
    decode = build_step(world, others, extend_lens=[1] * len(others), mode="decode")
    between = planned_in_buffers(world.backend, decode.batch)
    reports.append(("decode within a split prefill", judge(run_step(decode, between))))
    reports.append(("split prefill, last layer after a decode", judge(run_step(second, plan))))
    return gathered(reports)
