"""Checks of `anyattn verify --graphs`: each is named after a promise of captured steps.

This file: the table of checks, what they run on, and those about numbers.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from anyattn.core.graph.runner import GraphRunner
from anyattn.errors import GraphError
from anyattn.testing.graph_hooks import HookedPlatform
from anyattn.testing.graph_lab import GraphLab, GraphStep
from anyattn.testing.graph_replays import judged, replayed
from anyattn.testing.graph_twin import EagerTwin

__all__ = ["GRAPH_CHECKS", "GraphCheck", "Labs", "run_graph_check", "whole_buckets"]


class Labs:
    """A lab with a captured runner and its eager twin, made when first asked for and shared by checks.

    Attributes:
        replays: how many different batches `replays` draws.
    """

    def __init__(self, make: Callable[[], GraphLab], replays: int = 100) -> None:
        self.make, self.replays = make, replays

    @cached_property
    def lab(self) -> GraphLab:
        """Shared: a check leaves it usable."""
        return self.make()

    @cached_property
    def runner(self) -> GraphRunner:
        """Captured, tables filled inside the graph."""
        return self.lab.runner()

    @cached_property
    def early(self) -> GraphRunner:
        """Captured on the same backend, tables filled before the graph."""
        return self.lab.runner(early_tables=True)

    @cached_property
    def twin(self) -> EagerTwin:
        """Steps without graphs."""
        return EagerTwin(self.lab)

    def judged(self, step: GraphStep, runner: GraphRunner | None = None) -> list[str]:
        """Faults of one replay."""
        return judged(self.lab, runner or self.runner, self.twin, step)

    @property
    def hooks(self) -> HookedPlatform:
        """Of the lab's platform."""
        platform = self.lab.platform
        assert isinstance(platform, HookedPlatform)
        return platform

    @property
    def on_cuda(self) -> bool:
        """Graphs are CUDA's (or HIP's)."""
        return self.lab.device.type == "cuda"


GraphCheck = Callable[[Labs], list[str]]
"""Faults; empty where the promise holds. Raises `Skip` where it doesn't apply."""

_HERE = "anyattn.testing.graph_checks"
GRAPH_CHECKS: dict[str, str] = {
    "replays": f"{_HERE}:replays",
    "buckets": f"{_HERE}:buckets",
    "padding": f"{_HERE}:padding",
    "limits": f"{_HERE}:limits",
    "mask": f"{_HERE}:mask",
    "host-syncs": f"{_HERE}_memory:host_syncs",
    "allocations": f"{_HERE}_memory:allocations",
    "addresses": f"{_HERE}_memory:addresses_stay",
    "keeps-alive": f"{_HERE}_memory:keeps_alive",
    "staging": f"{_HERE}_memory:staging",
    "read-done": f"{_HERE}_order:read_done",
    "overlap": f"{_HERE}_order:overlap",
    "two-runners": f"{_HERE}_order:two_runners",
    "beside-work": f"{_HERE}_order:beside_work",
    "refusals": f"{_HERE}_refusals:refusals",
}
"""Name -> `module:function`, in the order in which they run."""


def run_graph_check(name: str, labs: Labs) -> list[str]:
    """Faults of one check.

    Raises:
        Skip: it doesn't apply.
    """
    module, _, function = GRAPH_CHECKS[name].partition(":")
    check: GraphCheck = getattr(importlib.import_module(module), function)
    return check(labs)


def _sizes(buckets: tuple[int, ...]) -> Iterator[int]:
    """Numbers of requests: down and up through all buckets, each full, one under, and barely entered."""
    entered = zip((0, *buckets), buckets, strict=False)
    falling = sorted({n for least, b in entered for n in (b, b - 1, least + 1) if n}, reverse=True)
    return itertools.cycle([*falling, *falling[-2:0:-1]])


def replays(labs: Labs) -> list[str]:
    """Many different batches through graphs captured with none of them."""
    lab, found = labs.lab, []
    for index, count in zip(range(labs.replays), _sizes(lab.setup.sizes.buckets), strict=False):
        found += labs.judged(lab.draw(count, on_device=index % 3 == 2))
        if found:
            break
    return found


def whole_buckets(lab: GraphLab) -> list[int]:
    """Every bucket exactly full."""
    return list(lab.setup.sizes.buckets)


def buckets(labs: Labs) -> list[str]:
    """Exactly full and one under run in the smallest bucket that holds them; one over is refused by name."""
    lab, runner, found = labs.lab, labs.runner, []
    below = 0
    for size in whole_buckets(lab):
        for count in {size, below + 1}:
            used = runner.entry(lab.draw(count).batch).key.num_requests
            if used != size:
                found.append(f"{count} requests run in the bucket of {used}, not of {size}")
        below = size
    full = lab.draw(below)
    found += [f"a bucket exactly full: {fault}" for fault in labs.judged(full)]
    over = lab.draw(below + 1)
    try:
        runner.replay(over.batch, **over.inputs)
        found.append(f"{below + 1} requests were not refused by buckets up to {below}")
    except GraphError as error:
        if "largest captured bucket" not in str(error):
            found.append(f"one over the largest bucket: {error}")
    except Exception as error:
        found.append(f"one over the largest bucket: {type(error).__name__}: {error}")
    found += [f"after a refusal: {fault}" for fault in labs.judged(full)]
    return found


def padding(labs: Labs) -> list[str]:
    """A step of padding alone stays finite; what page 0 holds reaches no request; storage stays as it was."""
    lab, runner = labs.lab, labs.runner
    found = labs.judged(lab.draw(max(whole_buckets(lab)) - 1))
    nobody = _padding_alone(lab, min(3, max(whole_buckets(lab))))  # and one more in the largest bucket
    before = _storage(lab)
    done = replayed(lab, runner, nobody)
    if not done.finite:
        found.append("a batch of padding alone isn't finite: padded rows are NaN")
    if any(not torch.equal(a[1:], b[1:]) for a, b in zip(before, _storage(lab), strict=True)):
        found.append("a batch of padding alone wrote to slots beyond page 0")
    if lab.traits.tolerates_nan_tail:
        found += _nan_sink(labs)
    return found


def _storage(lab: GraphLab) -> list[torch.Tensor]:
    return [c.view(torch.uint8).clone() for i in range(2) for c in lab.caches(i)]


def _padding_alone(lab: GraphLab, count: int) -> GraphStep:
    """What an idle rank of a data-parallel group runs: padded requests only."""
    tokens, mode = lab.setup.tokens, lab.setup.mode
    fill = lab.backend.get_cuda_graph_seq_len_fill_value(mode, tokens)
    rows, prefix, loc = [lab.table.padding_row] * count, [fill - tokens] * count, [0] * count * tokens
    batch = lab.make_batch(rows, prefix, loc, [], padding=count)
    inputs = {n: lab.random(len(loc), *x.shape[1:]).to(x.device) for n, x in lab.draw(1).inputs.items()}
    return GraphStep([], [], loc, [], batch, inputs)


def _nan_sink(labs: Labs) -> list[str]:
    """Page 0 full of NaN: padded rows may be anything, rows of requests are as ever."""
    lab, step = labs.lab, labs.lab.draw(max(whole_buckets(labs.lab)) - 1)
    sinks = [c for i in range(2) for c in lab.caches(i)]
    for cache in sinks:
        cache[0] = torch.nan
    error = lab.error(step, replayed(lab, labs.runner, step).own)
    for cache in sinks:
        cache[0] = 0
    return [] if error <= lab.tolerance else [f"NaN in page 0 reached a request: error {error:.3g}"]


def limits(labs: Labs) -> list[str]:
    """Graphs are captured with the shortest lengths there are, and serve the longest."""
    lab, runner, found = labs.lab, labs.runner, []
    longest = lab.setup.sizes.max_context - lab.setup.tokens
    for size in whole_buckets(lab):
        plan = runner.entry(lab.draw(size).batch).plan
        if plan.max_kv_len < lab.setup.sizes.max_context:
            found.append(
                f"max_kv_len {plan.max_kv_len} of the captured batch is frozen in the bucket of {size}"
            )
        for table in plan.tables.values():
            pages = -(-lab.setup.sizes.max_context // table.form.kernel_page)
            room = None
            if table.block_table is not None:
                room = table.block_table.shape[1]
            elif table.indices is not None:
                room = (table.indices.shape[0] - table.form.index_slack) // size
            if room is not None and room < pages:
                found.append(f"a table of the bucket of {size} has room for {room} entries, not {pages}")
    if not found:
        found = labs.judged(lab.draw(max(whole_buckets(lab)), [longest] * max(whole_buckets(lab))))
        found += labs.judged(lab.draw(1, [0]))
    return [f"longest steps: {fault}" for fault in found]


def mask(labs: Labs) -> list[str]:
    """A mask in another buffer than the captured one is refused; the captured one is read anew each time."""
    lab = labs.lab
    if lab.setup.mask is None:
        from anyattn.testing.checks import Skip

        raise Skip("chains have no mask")
    step = lab.draw(max(whole_buckets(lab)))
    other = lab.new_mask(lab.setup.mask)
    lab.fill_mask(step, other)
    stranger: Any = step.batch.view(mask=other)
    found = []
    try:
        labs.runner.replay(stranger, **step.inputs)
        found.append("another batch's mask: a mask in another buffer was taken for the captured one")
    except GraphError as error:
        if "mask" not in str(error):
            found.append(f"another mask: {error}")
    first = labs.judged(step)
    again = labs.judged(lab.step(step.rows, step.prefix))  # other trees, same requests
    return [*found, *(f"mask of an earlier step: {fault}" for fault in [*first, *again])]
