"""Faults in capture and replay, each caught by the check that names it; on stand-ins, recorded on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from anyattn.core.capabilities import ModelKind
from anyattn.testing.emulators import emulating
from anyattn.testing.graph_emulated import install_recordable
from anyattn.testing.graph_kit import GraphSubject, graph_subject
from anyattn.testing.mutants.graph_hunt import graph_mutants, hunt_graphs
from anyattn.testing.mutants.graphs import GRAPH_MUTANTS, SHARED, GraphMutant
from anyattn.testing.mutants.hunt import hunt_text


@pytest.fixture(name="subject", params=["fa3"])
def _subject(request: pytest.FixtureRequest) -> Iterator[GraphSubject]:
    yield from _standing_in(request.param)


@pytest.fixture(name="planned")
def _planned() -> Iterator[GraphSubject]:
    yield from _standing_in("flashinfer")


def _standing_in(name: str) -> Iterator[GraphSubject]:
    with emulating(name):
        yield graph_subject(name, "cpu", install_recordable(name).host, (ModelKind.DENSE,))


_named = partial(pytest.mark.parametrize, ids=lambda mutant: mutant.name.replace(" ", "-"))


@_named("mutant", GRAPH_MUTANTS["fa3"])
def test_faults_are_caught_by_name(subject: GraphSubject, mutant: GraphMutant) -> None:
    (caught,) = hunt_graphs(subject, [mutant])
    assert caught.caught, hunt_text([caught])
    assert caught.by.startswith((mutant.check, "capture of"))


@_named("mutant", [m for m in GRAPH_MUTANTS["flashinfer"] if m not in GRAPH_MUTANTS["fa3"]])
def test_faults_of_planned_libraries_are_caught(planned: GraphSubject, mutant: GraphMutant) -> None:
    (caught,) = hunt_graphs(planned, [mutant])
    assert caught.caught, hunt_text([caught])


def test_there_are_enough_of_them_for_each_backend() -> None:
    for mutants in (*GRAPH_MUTANTS.values(), SHARED):
        assert len({mutant.name for mutant in mutants}) == len(mutants) >= 15


def test_a_fault_that_nobody_names_is_no_catch(subject: GraphSubject) -> None:
    known = next(m for m in graph_mutants(subject) if m.check == "limits")
    odd = GraphMutant(
        name="unnamed", where=known.where, old=known.old, new=known.new, names=("weather",), check="limits"
    )
    (caught,) = hunt_graphs(subject, [odd])
    assert not caught.caught
    assert caught.unnamed > 0
