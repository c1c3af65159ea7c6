"""One replay, looked at from all sides: eager at the same bucket, the oracle, and each tensor of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from anyattn.core.graph.runner import GraphRunner
from anyattn.core.plan import Plan
from anyattn.core.traits import Determinism
from anyattn.testing.graph_lab import GraphLab, GraphStep
from anyattn.testing.graph_twin import EagerTwin

__all__ = ["Replayed", "contents", "differing", "judged", "poison", "replayed"]

_NAN = 12345.0  # stands for NaN, which isn't equal to itself


@dataclass(eq=False)
class Replayed:
    """What a replay gave: rows of the step, all rows of the bucket, and the plan as it stands."""

    step: GraphStep
    own: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    plan: Plan
    size: int

    @cached_property
    def finite(self) -> bool:
        """No row is NaN or infinite, padded ones included."""
        return all(bool(torch.isfinite(x).all()) for x in self.whole.values())


def poison(lab: GraphLab, runner: GraphRunner, plan: Plan) -> None:
    """Whatever a replay has to write anew is spoiled: static inputs are NaN, tables name nobody's pages."""
    for static in runner.inputs.values():
        static.fill_(torch.nan)
    for table in plan.tables.values():
        for entries in (table.indices, table.block_table):
            if entries is not None:
                entries.fill_(lab.nobody // table.form.kernel_page)


def replayed(lab: GraphLab, runner: GraphRunner, step: GraphStep, *, spoil: bool = True) -> Replayed:
    """Fill the mask, spoil what is stale, replay, and copy what came out."""
    lab.fill_mask(step)
    entry = runner.entry(step.batch)
    if spoil:
        poison(lab, runner, entry.plan)
    own = {name: x.clone() for name, x in runner.replay(step.batch, **step.inputs).items()}
    whole = {name: x.clone() for name, x in entry.outputs.items()}
    return Replayed(step, own, whole, entry.plan, entry.key.num_requests)


def judged(lab: GraphLab, runner: GraphRunner, twin: EagerTwin, step: GraphStep) -> list[str]:
    """What is wrong with a replay of `step`; the first fault names the field that was stale."""
    done = replayed(lab, runner, step)
    want, plan = twin.run(step, done.size)
    found = [f"{name} is not this step's ({step})" for name in differing(done.plan, plan)]
    found += [f"{name} is not this step's ({step})" for name in _stale_on_host(done.plan, plan)]
    found += _shapes(lab, done)
    if not done.finite:
        found.append(f"padded rows are not finite ({step})")
    exact = lab.traits.determinism >= Determinism.RUN_TO_RUN
    for name, value in want.items():
        same = torch.equal(done.whole[name].nan_to_num(_NAN), value.nan_to_num(_NAN))
        if exact and not same:
            found.append(f"{name} differs from the eager step in the same bucket ({step})")
    if not found or not exact:
        error = lab.error(step, done.own)
        if not error <= lab.tolerance:
            found.append(f"error {error:.3g} against the oracle, allowed {lab.tolerance:.0e} ({step})")
    else:
        lab.expected(step)  # its KV is stored now
    return found


def _shapes(lab: GraphLab, done: Replayed) -> list[str]:
    tokens = len(done.step.rows) * lab.setup.tokens
    return [
        f"{name} has {x.shape[0]} rows for a step of {tokens} tokens"
        for name, x in done.own.items()
        if x.shape[0] != tokens
    ]


def differing(plan: Plan, twin: Plan) -> list[str]:
    """Names of what the two plans hold differently."""
    mine, its = dict(contents(plan)), dict(contents(twin))
    return [
        name
        for name in sorted({*mine, *its})
        if name not in mine or name not in its or not _same(mine[name], its[name])
    ]


def _stale_on_host(plan: Plan, twin: Plan) -> Iterator[str]:
    """Host mirrors against what the twin was given, and against what stands on the device."""
    exact = twin.batch.exact
    if exact is not None and plan.host_seq_lens != exact.seq_lens.tolist():
        yield "host_seq_lens"
    for number, table in enumerate(plan.tables.values()):
        host = table.host
        if host is not None and not torch.equal(host.kv_lens, table.kv_lens.cpu()):
            yield f"host indptr of table {number}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def contents(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Everything that the core fills for a step, by name."""
    for name in ("req_pool_indices", "seq_lens", "extend_lens", "prefix_lens", "query_offsets", "positions"):
        yield name, getattr(plan, name)
    yield "max_q_len", plan.max_q_len
    yield "max_kv_len", plan.max_kv_len
    for space, loc in plan.write_locs.items():
        yield f"out_cache_loc of {space.value}", loc
    for window, loc in plan.window_locs.items():
        yield f"out_cache_loc of window {window}", loc
    if plan.mask_indptr is not None:
        yield "mask_indptr", plan.mask_indptr
    for number, table in enumerate(plan.tables.values()):
        for name in ("kv_start", "kv_lens", "indptr", "indices", "block_table", "last_page_len"):
            if getattr(table, name) is not None:
                yield f"{name} of table {number}", getattr(table, name)
