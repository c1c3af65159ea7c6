"""Checks of prompts longer than what a backend computes at once: blocks of queries, tiles of keys."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

import anyattn
from anyattn.testing import oracle
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Skip, Subject
from anyattn.testing.judge import run_step

__all__ = ["long_step", "rechunked"]

_SCORES = 1 << 26  # score elements of the step: more than anybody holds at once
_JUDGED = 48  # queries at either end that are compared


def long_step(subject: Subject, case: Case) -> Outcome:
    """A prompt of more than 2**26 scores, computed in blocks; its first and last rows are judged."""
    if subject.declared.interpreted:
        raise Skip("a long prompt takes minutes in Triton's interpreter")
    length = math.isqrt(_SCORES // case.num_q_heads) + 2 * _JUDGED
    world = subject.world(dataclasses.replace(case, prefix_lens=(0,), extend_lens=(length,)))
    step = build_step(world)
    plan = world.backend.init_forward_metadata(step.batch)
    with anyattn.forward_context(world.backend, plan):
        result = world.layer(step.q, step.k, step.v, step.batch, return_lse=case.return_lse)
    out, lse = result if isinstance(result, tuple) else (result, None)
    error, slots = 0.0, step.requests[0].slots
    for end in (_JUDGED, length):
        rows = slice(end - _JUDGED, end)
        request = oracle.OracleRequest(slots=slots[:end], num_queries=_JUDGED)
        want = oracle.attend(
            step.q[rows].cpu(), step.keys, step.values, [request], scale=world.case.spec().scale
        )
        error = max(error, oracle.relative_error(out[rows], want[0]))
        if lse is not None:
            error = max(error, oracle.relative_error(lse[rows], want[1], floor=1.0))
    return Outcome(error, case.tolerance())


def rechunked(subject: Subject, case: Case) -> Outcome:
    """A windowed prompt of several tiles, cut at several places: the same bits, where that is declared."""
    if subject.declared.determinism() < 2:
        raise Skip("doesn't declare batch invariance")
    refused = subject.declared.refusal(case, "batch-invariant")
    if refused is not None:
        raise Skip(refused)
    if case.dtype != case.kv_dtype:
        raise Skip("quantised KV is attended to as given in its own step and as stored in later ones")
    (total,) = case.extend_lens
    whole = run_step(build_step(subject.world(case, deterministic="batch-invariant")))
    assert whole.out is not None
    assert whole.k is not None
    assert whole.v is not None
    faults = []
    for cuts in ((0, 3 * total // 4, total), (0, total // 2 + 1, 7 * total // 10 - 1, total)):
        world, outs = subject.world(case, deterministic="batch-invariant"), []
        for start, end in itertools.pairwise(cuts):
            rows = slice(start, end)
            inputs = whole.q[rows], whole.k[rows], whole.v[rows]
            part = build_step(world, [0], [start], [end - start], fill_prefix=False, inputs=inputs)
            run_step(part)
            assert part.out is not None
            outs.append(part.out)
        if not torch.equal(torch.cat(outs), whole.out):
            faults.append(f"chunks that end at {cuts[1:]} give other bits (batch-invariant)")
    return Outcome(faults=tuple(faults))
