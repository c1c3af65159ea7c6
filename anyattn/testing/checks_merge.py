"""Checks of the log-sum-exp: partial states over disjoint keys merge to the whole, sinks count once.

The same query is run against a request that lists the first keys, one that lists the rest and one that lists
all: with a log-sum-exp in another base, of unscaled logits or with a sink in it, the parts don't add up.
"""

from __future__ import annotations

import dataclasses
import math

import torch

import anyattn
from anyattn.core.capabilities import Feature
from anyattn.testing import oracle
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject
from anyattn.testing.judge import run_step
from anyattn.testing.world import World

__all__ = ["merge", "merge_empty", "sinks_once"]


def merge(subject: Subject, case: Case) -> Outcome:
    """`AttentionState.merge` of two parts is the whole. Case: prefixes of m and n keys, m whole pages."""
    return _merged(subject, case, sinks=False)


def sinks_once(subject: Subject, case: Case) -> Outcome:
    """Parts without sinks, merged and finalised once, are what a layer with sinks gives."""
    return _merged(subject, case, sinks=True)


def merge_empty(subject: Subject, case: Case) -> Outcome:
    """A step merged with itself: rows without a key stay empty, all others gain ln 2. Case: has such rows."""
    if not subject.declared.declares_jointly(Feature.LSE):
        raise Skip("doesn't declare lse")
    step = run_step(build_step(subject.world(case)))
    assert step.out is not None
    assert step.lse is not None
    got = (state := anyattn.AttentionState(step.out, step.lse)).merge(state)
    empty = torch.isneginf(step.lse)
    faults = []
    if not bool(empty.any()):
        faults.append("no row is empty: rows without a key have a log-sum-exp of -inf")
    if not bool((got.out[empty] == 0).all() and torch.isneginf(got.lse[empty]).all()):
        faults.append("two empty states don't merge to an empty one (zero, -inf)")
    full = ~empty
    out = oracle.relative_error(got.out[full], step.out[full].cpu().double())
    lse = oracle.relative_error(got.lse[full], step.lse[full].cpu().double() + math.log(2.0), floor=1.0)
    return Outcome(max(out, lse), case.tolerance(), tuple(faults))


def _merged(subject: Subject, case: Case, *, sinks: bool) -> Outcome:
    needed = [Feature.LSE, *([Feature.SINKS] if sinks else [])]
    missing = [f.value for f in needed if not subject.declared.declares_jointly(f)]
    if missing:
        raise Skip(f"doesn't declare {', '.join(missing)}")
    first, rest = case.prefix_lens
    whole_case = dataclasses.replace(case, prefix_lens=(first, rest, first + rest), extend_lens=(1, 1, 1))
    with_sinks = dataclasses.replace(whole_case, sinks=sinks)
    if refused := subject.declared.refusal(with_sinks):
        raise Skip(refused)
    plain = dataclasses.replace(whole_case, sinks=False).spec()
    specs = [with_sinks.spec(), dataclasses.replace(plain, kv_shared_with=0)]
    world = subject.world(with_sinks, specs=specs)
    _list_parts(world)
    q = world.random(1, case.num_q_heads, case.head_dim).to(world.device)
    partial = anyattn.AttentionLayer(specs[1], 1).to(world.device)
    a, b = (_state(world, partial, q, member) for member in (0, 1))
    whole = _state(world, world.layer, q, 2)
    sink_logits = None if world.sinks is None else world.sinks.to(world.device)
    got = a.merge(b).finalise(sink_logits)
    out = oracle.relative_error(got.out, whole.out.cpu().double())
    lse = oracle.relative_error(got.lse, whole.lse.cpu().double(), floor=1.0)
    faults = []
    if not lse <= 2 * case.tolerance():
        faults.append(f"merged log-sum-exp is off by {lse:.3g}: base, scale, or sinks in a part")
    if not out <= 2 * case.tolerance():
        faults.append(f"merged output is off by {out:.3g}")
    return Outcome(max(out, lse), 2 * case.tolerance(), tuple(faults))


def _list_parts(world: World) -> None:
    """Request 2 lists the keys of requests 0 and 1; its own last slot takes the query's place."""
    first, rest = (world.slots[m][:-1] for m in (0, 1))
    world.slots[2] = torch.cat([first, rest, world.slots[2][-1:]])
    for member, slots in enumerate(world.slots):
        world.table.req_to_token[world.rows[member], : slots.shape[0]] = slots.to(world.device, torch.int32)
    for slots in (first, rest):
        world.fill(slots)


def _state(
    world: World, layer: anyattn.AttentionLayer, q: torch.Tensor, member: int
) -> anyattn.AttentionState:
    """The query against all but the last listed key: a one-token step that reads everything from the pool."""
    length = world.slots[member].shape[0] - 1
    step = build_step(world, [member], [length - 1], [1], kv="cached", fill_prefix=False)
    plan = world.backend.init_forward_metadata(step.batch)
    with anyattn.forward_context(world.backend, plan):
        out, lse = layer(q, None, None, step.batch, return_lse=True)
    return anyattn.AttentionState(out, lse)
