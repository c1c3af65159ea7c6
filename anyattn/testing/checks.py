"""Checks of the kit: each takes a case and says what went wrong. This file: the types, the table, numbers.

A check is named after the promise that it proves, so that a failure names the fault.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anyattn.testing.cases import Case
from anyattn.testing.declared import Declared
from anyattn.testing.judge import Report, check_case
from anyattn.testing.world import World

__all__ = ["CHECKS", "Check", "Outcome", "Skip", "Subject", "gathered", "run_check"]


class Skip(Exception):
    """The check doesn't apply to this backend, host or case; the text says why."""


@dataclass(frozen=True)
class Subject:
    """The backend under test, where it runs; `host` is emulated there, or a plugin's, or None.

    `named`: the device as a command line names it, where tensors lie on one of another name.
    """

    declared: Declared
    device: str
    host: str | None = None
    named: str | None = None

    @property
    def where(self) -> str:
        """The device as `--device` takes it."""
        return self.named or self.device

    def world(self, case: Case, **options: Any) -> World:
        """A world of the case; options as in `World`."""
        return World(case, backend=self.declared.name, device=self.device, host=self.host, **options)


@dataclass(frozen=True)
class Outcome:
    """The largest error, what is allowed, and promises that were broken."""

    error: float = 0.0
    tolerance: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Within the tolerance, without a fault. A NaN error fails."""
        return not self.faults and self.error <= self.tolerance

    def why(self) -> str:
        """One line: what is wrong."""
        parts = list(self.faults)
        if not self.error <= self.tolerance:
            parts.insert(0, f"error {self.error:.3g}, allowed {self.tolerance:.0e}")
        return "; ".join(parts)


Check = Callable[[Subject, Case], Outcome]

CHECKS: dict[str, str] = {
    "numbers": "anyattn.testing.checks:numbers",
    "chunked": "anyattn.testing.checks_steps:chunked",
    "served": "anyattn.testing.checks_steps:served",
    "several-plans": "anyattn.testing.checks_steps:several_plans",
    "stable-buffers": "anyattn.testing.checks_steps:stable_buffers",
    "run-to-run": "anyattn.testing.checks_steps:run_to_run",
    "batch-invariant": "anyattn.testing.checks_steps:batch_invariant",
    "batch-invariant-chunks": "anyattn.testing.checks_long:rechunked",
    "long-step": "anyattn.testing.checks_long:long_step",
    "layer-masks": "anyattn.testing.checks_layers:layer_masks",
    "layer-scales": "anyattn.testing.checks_layers:layer_scales",
    "split-prefill": "anyattn.testing.checks_layers:split_prefill",
    "verify-mask": "anyattn.testing.checks_trees:verify_mask",
    "merge": "anyattn.testing.checks_merge:merge",
    "merge-empty": "anyattn.testing.checks_merge:merge_empty",
    "sinks-once": "anyattn.testing.checks_merge:sinks_once",
    "poisoned-padding": "anyattn.testing.checks_promises:poisoned_padding",
    "idle": "anyattn.testing.checks_promises:idle",
    "host-lengths": "anyattn.testing.checks_promises:host_lengths",
    "stale-lengths": "anyattn.testing.checks_promises:stale_lengths",
    "shared-reads": "anyattn.testing.checks_promises:shared_reads",
    "no-host-sync": "anyattn.testing.checks_promises:no_host_sync",
    "undeclared-feature": "anyattn.testing.checks_refusals:undeclared_feature",
    "head-counts": "anyattn.testing.checks_refusals:head_counts",
    "over-wide-layer": "anyattn.testing.checks_refusals:over_wide_layer",
    "other-plan": "anyattn.testing.checks_refusals:other_plan",
    "tables": "anyattn.testing.checks_tables:tables",
    "offsets-past-2-31": "anyattn.testing.checks_memory:offsets",
}
"""Name -> `module:function`; a file is imported when one of its checks runs."""


def run_check(name: str, subject: Subject, case: Case) -> Outcome:
    """Run one check.

    Raises:
        Skip: it doesn't apply.
    """
    module, _, function = CHECKS[name].partition(":")
    check: Check = getattr(importlib.import_module(module), function)
    return check(subject, case)


def gathered(reports: Iterable[tuple[str, Report]], faults: Iterable[str] = ()) -> Outcome:
    """One outcome of several judged steps, each with a name for its faults."""
    error, tolerance, found = 0.0, 0.0, [*faults]
    for name, report in reports:
        tolerance = max(tolerance, report.tolerance)
        found += [f"{name}: {fault}" for fault in report.faults]
        if not report.error <= report.tolerance:
            found.append(f"{name}: error {report.error:.3g}")
        error = max(error, report.error)
    return Outcome(error, tolerance, tuple(dict.fromkeys(found)))


def numbers(subject: Subject, case: Case) -> Outcome:
    """The step against the float64 oracle; inputs, tables and all other slots stay as they are."""
    report = check_case(case, backend=subject.declared.name, device=subject.device, host=subject.host)
    return Outcome(report.error, report.tolerance, report.faults)
