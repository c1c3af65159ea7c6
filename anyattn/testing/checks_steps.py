"""Checks over several steps: chunked = whole, a served conversation, several plans, buffers, determinism."""

from __future__ import annotations

import torch

from anyattn.testing import oracle
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject, gathered
from anyattn.testing.judge import judge, planned_in_buffers, run_step

__all__ = ["batch_invariant", "chunked", "run_to_run", "served", "several_plans", "stable_buffers"]

_CUTS = (1, 3, 16)


def _rows(step: Step, member: int) -> slice:
    counts = [r.num_queries for r in step.requests]
    start = sum(counts[:member])
    return slice(start, start + counts[member])


def _inputs(step: Step, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    assert step.k is not None
    assert step.v is not None
    return step.q[rows], step.k[rows], step.v[rows]


def _exact_kv(case: Case) -> bool:
    return case.dtype == case.kv_dtype and case.k_scale == case.v_scale == 1.0


def chunked(subject: Subject, case: Case) -> Outcome:
    """A prompt in one step, and cut into chunks: each chunk is right, and together they are the whole."""
    whole = run_step(build_step(subject.world(case)))
    reports, faults = [("whole", judge(whole))], []
    total, (prefix, *_) = case.extend_lens[0], case.prefix_lens
    assert whole.out is not None
    for cut in _CUTS:
        world, outs = subject.world(case), []
        for start in range(0, total, cut):
            rows = slice(start, min(total, start + cut))
            inputs = _inputs(whole, rows)
            step = build_step(
                world, [0], [prefix + start], [rows.stop - start], fill_prefix=start == 0, inputs=inputs
            )
            run_step(step)
            reports.append((f"chunks of {cut}, token {start}", judge(step)))
            assert step.out is not None
            outs.append(step.out)
        error = oracle.relative_error(torch.cat(outs), whole.out.cpu().double())
        if prefix == 0 and _exact_kv(case) and error > 2 * case.tolerance():
            faults.append(f"chunks of {cut} differ from the whole by {error:.3g}")
    return gathered(reports, faults)


def served(subject: Subject, case: Case) -> Outcome:
    """Prefill, decode in another order with a request gone, a newcomer in its place, decode on."""
    world = subject.world(case, spare=3)
    lens, last = list(case.seq_lens), case.batch_size - 1
    reports = [("prefill", judge(run_step(build_step(world))))]

    def decode(members: list[int], name: str) -> None:
        ones = [1] * len(members)
        step = build_step(world, members, [lens[m] for m in members], ones, mode="decode", fill_prefix=False)
        reports.append((name, judge(run_step(step))))
        for member in members:
            lens[member] += 1

    stay = [m for m in reversed(range(case.batch_size)) if m != last]
    decode(stay, "decode after a request left")
    newcomer = build_step(world, [last], [0], [min(3, case.seq_lens[last])], mode="extend", fill_prefix=False)
    reports.append(("a newcomer in its slots", judge(run_step(newcomer))))
    lens[last] = min(3, case.seq_lens[last])
    decode([last, *stay], "decode, reordered")
    decode(sorted(stay), "decode of a smaller batch")
    return gathered(reports)


def several_plans(subject: Subject, case: Case) -> Outcome:
    """Two steps planned before either runs, run in turns: a plan must not see the other."""
    world = subject.world(case)
    half = case.batch_size // 2
    steps = [build_step(world, list(range(half))), build_step(world, list(range(half, case.batch_size)))]
    plans = [world.backend.init_forward_metadata(step.batch) for step in steps]
    reports = [(f"plan {turn} of two", judge(run_step(steps[turn], plans[turn]))) for turn in (0, 1, 1, 0, 1)]
    return gathered(reports)


def stable_buffers(subject: Subject, case: Case) -> Outcome:
    """Steps of falling sizes in the same preallocated buffers, as a graph has them: no stale entries."""
    world = subject.world(case)
    limits = world.decision.request.limits
    assert limits is not None
    world.backend.init_cuda_graph_state(limits)
    reports = []
    for count in range(case.batch_size, 0, -1):
        step = build_step(world, list(range(count)))
        plan = planned_in_buffers(world.backend, step.batch)
        reports.append((f"{count} requests in the same buffers", judge(run_step(step, plan))))
    return gathered(reports)


def run_to_run(subject: Subject, case: Case) -> Outcome:
    """The same step three times gives the same bits, where that is declared."""
    if subject.declared.determinism() < 1:
        raise Skip("declares no determinism")
    refused = subject.declared.refusal(case, "run-to-run")
    if refused is not None:
        raise Skip(refused)
    world = subject.world(case, deterministic="run-to-run")
    step = build_step(world)
    results = []
    for _ in range(3):
        run_step(step)
        assert step.out is not None
        results.append((step.out.clone(), None if step.lse is None else step.lse.clone()))
    same = all(_same(results[0], other) for other in results[1:])
    report = judge(step)
    return gathered([("repeated", report)], [] if same else ["the same step gave other bits (run-to-run)"])


def _same(a: tuple[torch.Tensor, torch.Tensor | None], b: tuple[torch.Tensor, torch.Tensor | None]) -> bool:
    outs = torch.equal(a[0], b[0])
    return outs and (a[1] is None or (b[1] is not None and torch.equal(a[1], b[1])))


def batch_invariant(subject: Subject, case: Case) -> Outcome:
    """Alone = batched = re-chunked, bit for bit, where that is declared."""
    if subject.declared.determinism() < 2:
        raise Skip("doesn't declare batch invariance")
    refused = subject.declared.refusal(case, "batch-invariant")
    if refused is not None:
        raise Skip(refused)
    options = {"deterministic": "batch-invariant"}
    batched = run_step(build_step(subject.world(case, **options)))
    assert batched.out is not None
    reports, faults = [("batched", judge(batched))], []
    alone_world = batched.world
    for member in range(case.batch_size):
        rows = _rows(batched, member)
        step = build_step(alone_world, [member], fill_prefix=False, inputs=_inputs(batched, rows))
        run_step(step)
        if step.out is None or not torch.equal(step.out, batched.out[rows]):
            faults.append(f"request {member} alone differs from the batch, bit for bit (batch-invariant)")
    if case.mode == "extend":
        faults += _rechunked(batched)
    return gathered(reports, faults)


def _rechunked(batched: Step) -> list[str]:
    """The last tokens of each request again, in a step of their own on what is stored."""
    faults, case = [], batched.world.case
    if not _exact_kv(case):
        return []  # quantised KV is attended to as given in the first step and as stored in the second
    assert batched.out is not None
    for member, count in enumerate(case.extend_lens):
        if count < 2:
            continue
        rows, cut = _rows(batched, member), count // 2
        tail = slice(rows.start + cut, rows.stop)
        prefix = case.prefix_lens[member] + cut
        step = build_step(
            batched.world, [member], [prefix], [count - cut], fill_prefix=False, inputs=_inputs(batched, tail)
        )
        run_step(step)
        if step.out is None or not torch.equal(step.out, batched.out[tail]):
            faults.append(f"request {member} re-chunked differs, bit for bit (batch-invariant)")
    return faults
