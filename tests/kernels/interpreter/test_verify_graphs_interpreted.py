"""The verifier of graphs on our own kernels in the interpreter: `anyattn verify triton --graphs`, small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anyattn.core.capabilities import ModelKind
from anyattn.testing.graph_kit import GraphSubject, graph_subject, run_setup
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.mutants.graph_hunt import graph_mutants, hunt_graphs
from anyattn.testing.mutants.hunt import hunt_text


@pytest.fixture(name="subject", scope="module")
def _subject() -> GraphSubject:
    offer_triton()
    return replace(graph_subject("triton", "cpu", kinds=(ModelKind.DENSE,)), buckets=(1, 2))


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("decode, window 6, sinks", ("replays", "host-syncs", "allocations")),
        ("target_verify, tree (qlen_only)", ("replays", "mask")),
    ],
)
def test_promises_are_kept(subject: GraphSubject, name: str, checks: tuple[str, ...]) -> None:
    setup = next(s for s in subject.setups() if s.name == name)
    setup = replace(setup, sizes=replace(setup.sizes, max_context=40))
    results = list(run_setup(subject, setup, checks, replays=2))
    assert [(r.check, r.faults, r.skipped) for r in results] == [(check, (), "") for check in checks]


@pytest.mark.parametrize(
    "fault", ["allocation inside the graph", "the captured plan is dropped", "windows begin where"]
)
def test_faults_of_fused_tables_are_caught(subject: GraphSubject, fault: str) -> None:
    (mutant,) = [m for m in graph_mutants(subject) if m.name.startswith(fault)]
    (caught,) = hunt_graphs(subject, [mutant])
    assert caught.caught, hunt_text([caught])
