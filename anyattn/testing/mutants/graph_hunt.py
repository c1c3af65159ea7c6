"""Do the checks of graphs notice? Each mutant is applied before the capture, and judged by its check."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from anyattn.testing.graph_kit import GraphSubject, run_setup
from anyattn.testing.graph_setup import GraphSetup
from anyattn.testing.mutants.graphs import GRAPH_MUTANTS, SHARED, GraphMutant
from anyattn.testing.mutants.hunt import Caught
from anyattn.testing.mutants.patching import MutantError, applied

__all__ = ["graph_mutants", "hunt_graphs"]

_REPLAYS = 8


def graph_mutants(subject: GraphSubject) -> tuple[GraphMutant, ...]:
    """Those that the backend can show; what breaks the capture itself comes last."""
    mutants = GRAPH_MUTANTS.get(subject.record.name, SHARED)
    return tuple(sorted(mutants, key=lambda mutant: mutant.name == SHARED[-1].name))


def hunt_graphs(subject: GraphSubject, mutants: Sequence[GraphMutant] | None = None) -> list[Caught]:
    """Every mutant (or those given) against its check, on the smallest model that shows it."""
    setups = subject.setups()
    return [_hunted(mutant, subject, setups) for mutant in mutants or graph_mutants(subject)]


def _hunted(mutant: GraphMutant, subject: GraphSubject, setups: Sequence[GraphSetup]) -> Caught:
    setup = next((s for s in setups if mutant.on in s.name), setups[0])
    unnamed = 0
    try:
        with applied(mutant), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for result in run_setup(subject, setup, (mutant.check,), _REPLAYS):
                where = f"{result.check} of {result.setup}"
                for fault in result.faults:
                    if any(word in f"{where}: {fault}" for word in mutant.names):
                        return Caught(mutant.name, mutant.report, where, fault, unnamed)
                    unnamed += 1
    except MutantError as error:
        return Caught(mutant.name, mutant.report, why=" ".join(str(error).split()))
    return Caught(mutant.name, mutant.report, unnamed=unnamed)
