"""Checks of what a backend declares about a step: host lengths, shared reads, padding, idle steps, syncs.

A declaration is proven by taking away what it says isn't needed.
"""

from __future__ import annotations

import dataclasses

import torch

import anyattn
from anyattn.core.host_lengths import HostLengths, UpperBound
from anyattn.core.traits import HostLengthNeed, SharedReadEnds
from anyattn.errors import HostLengthError
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject, gathered
from anyattn.testing.judge import Report, judge, run_step
from anyattn.testing.world import World

__all__ = [
    "host_lengths",
    "idle",
    "no_host_sync",
    "poisoned_padding",
    "shared_reads",
    "stale_lengths",
    "with_lse",
]

_FAR = 1 << 20


def _bounds(case: Case, factor: int = 1) -> UpperBound:
    return UpperBound(max(case.seq_lens) * factor, max(case.extend_lens) * factor)


def host_lengths(subject: Subject, case: Case) -> Outcome:
    """Declared NONE: right without any length on the host. BOUND: right with bounds, tight and far too large.

    What is declared as needed must be asked for by name.
    """
    world = subject.world(case)
    step = build_step(world)
    need = world.backend.traits(step.batch.forward_mode).host_lengths
    far = UpperBound(_FAR, _FAR)
    trials: list[tuple[str, HostLengths, HostLengthNeed]] = [
        ("no length on the host", None, HostLengthNeed.NONE),
        ("tight bounds", _bounds(case), HostLengthNeed.BOUND),
        ("bounds far too large", far, HostLengthNeed.BOUND),
    ]
    reports: list[tuple[str, Report]] = []
    faults: list[str] = []
    for name, given, enough_for in trials:
        step.batch = step.batch.view(host_lens=given)
        if need <= enough_for:
            reports.append((name, judge(run_step(step))))
        elif not _asks_for_lengths(world, step):
            faults.append(f"needs {need.name.lower()} host lengths, yet took {name}")
    return gathered(reports, faults)


def _asks_for_lengths(world: World, step: Step) -> bool:
    try:
        world.backend.init_forward_metadata(step.batch)
    except HostLengthError:
        return True
    return False


def stale_lengths(subject: Subject, case: Case) -> Outcome:
    """Planned with one set of lengths, run with another: the device's lengths decide (as in a replay)."""
    world = subject.world(case)
    step = build_step(world)
    if world.backend.traits(step.batch.forward_mode).host_lengths is HostLengthNeed.EXACT:
        raise Skip("needs exact host lengths, so a plan is for one set of lengths")
    true = step.batch.seq_lens
    ext = step.batch.extend_seq_lens
    reports = []
    for name, stale in (("shorter", ext), ("longer", (true + 5).clamp_max(world.max_context))):
        step.batch = step.batch.view(seq_lens=stale, host_lens=_bounds(case, 2))
        plan = world.backend.init_forward_metadata_out_graph(step.batch)
        plan.seq_lens.copy_(true)
        world.backend.init_forward_metadata_in_graph(plan)
        reports.append((f"planned for {name} requests", judge(run_step(step, plan))))
    return gathered(reports)


def shared_reads(subject: Subject, case: Case) -> Outcome:
    """Tables, lengths and slots change after the declared end of shared reads: the output may not."""
    world = subject.world(case)
    step = build_step(world)
    ends = world.backend.traits(step.batch.forward_mode).shared_read_ends
    if ends is SharedReadEnds.UNKNOWN:
        raise Skip("declares no end of shared reads (UNKNOWN)")
    batch = step.batch = step.batch.view(
        seq_lens=step.batch.seq_lens.clone(),
        out_cache_loc=None if step.batch.out_cache_loc is None else step.batch.out_cache_loc.clone(),
        req_pool_indices=step.batch.req_pool_indices.clone(),
    )
    plan = world.backend.init_forward_metadata_out_graph(batch)
    if ends is SharedReadEnds.PRE_REPLAY:
        _overwrite(world, step)
    world.backend.init_forward_metadata_in_graph(plan)
    if ends is SharedReadEnds.IN_REPLAY:
        _overwrite(world, step)
    run_step(step, plan)
    if ends is SharedReadEnds.POST_REPLAY:
        _overwrite(world, step)
    return gathered([(f"overwritten at {ends.name}", judge(step))])


def _overwrite(world: World, step: Step) -> None:
    """As a scheduler that prepares the next step: other slots, other lengths, other rows."""
    batch = step.batch
    nobodys = world.pool.total_slots - 1
    world.table.req_to_token.fill_(nobodys)
    if world.table.encoder_to_token is not None:
        world.table.encoder_to_token.fill_(nobodys)
    batch.seq_lens.fill_(1)
    batch.req_pool_indices.fill_(world.table.padding_row)
    if batch.out_cache_loc is not None:
        batch.out_cache_loc.fill_(nobodys)


def poisoned_padding(subject: Subject, case: Case) -> Outcome:
    """Padded rows full of NaN: real rows don't see them, padded rows of the output are zero."""
    step = build_step(subject.world(case))
    for x in (step.q, step.k, step.v):
        if x is not None:
            x[-case.padding :] = torch.nan
    return gathered([("NaN in padded rows", judge(run_step(step)))])


def idle(subject: Subject, case: Case) -> Outcome:
    """An idle step runs no kernel: empty outputs of the right shape, storage as it was."""
    world = subject.world(case)
    batch = anyattn.ForwardBatch.idle()
    plan = world.backend.init_forward_metadata(batch)
    before = [c.clone() for c in (world.pool.key_cache(0), world.pool.value_cache(0))]
    q, k, v = (
        torch.empty(0, heads, size, dtype=world.dtype, device=world.device)
        for heads, size in (
            (case.num_q_heads, case.head_dim),
            (case.num_kv_heads, case.head_dim),
            (case.num_kv_heads, case.v_head_dim),
        )
    )
    with anyattn.forward_context(world.backend, plan):
        out = world.layer(q, k, v, batch)
        flat = world.layer(q.flatten(1), None, None, batch)
    faults = []
    shapes = [tuple(x.shape) for x in (out, flat)]
    if shapes != [(0, case.num_q_heads, case.v_head_dim), (0, case.num_q_heads * case.v_head_dim)]:
        faults.append(f"idle outputs have shapes {shapes}")
    after = (world.pool.key_cache(0), world.pool.value_cache(0))
    if any(not torch.equal(_bits(a), _bits(b)) for a, b in zip(before, after, strict=True)):
        faults.append("an idle step wrote to the pool")
    return Outcome(faults=tuple(faults))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def with_lse(subject: Subject, case: Case) -> Case:
    """The case with an LSE, where the backend declares one for it."""
    asked = dataclasses.replace(case, return_lse=True)
    return case if subject.declared.refusal(asked) else asked


def no_host_sync(subject: Subject, case: Case) -> Outcome:
    """Planning and running wait for nothing on the device, where less than exact host lengths is declared."""
    if torch.device(subject.device).type != "cuda":
        raise Skip("only an accelerator has anything to wait for")
    case = with_lse(subject, dataclasses.replace(case, device_ints=True))
    world = subject.world(case)
    step = build_step(world)
    if world.backend.traits(step.batch.forward_mode).host_lengths is HostLengthNeed.EXACT:
        raise Skip("needs exact host lengths")
    step.batch = step.batch.view(host_lens=_bounds(case))
    reports = [("warm-up", judge(run_step(step)))]  # compiles
    step.batch = step.batch.view()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = world.backend.init_forward_metadata(step.batch)
        with anyattn.forward_context(world.backend, plan):
            world.layer(step.q, step.k, step.v, step.batch, save_kv_cache=step.kv == "write")
    except RuntimeError as error:
        return gathered(reports, [f"waits for the device: {str(error).splitlines()[0]}"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return gathered(reports)
