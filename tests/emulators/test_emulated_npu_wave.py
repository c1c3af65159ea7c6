"""`ascend` and `wave` on stand-ins: the kit passes on every chip, and notices faults in the calls."""

from __future__ import annotations

from functools import cache

import pytest

from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulating, emulator_of
from anyattn.testing.kit import run_items
from anyattn.testing.mutants import MUTANTS, Mutant
from anyattn.testing.mutants.hunt import hunt_one, hunt_text
from anyattn.testing.plan import Item, plan_kit

HOSTS = {"ascend:910b": ("ascend", 24), "ascend:310p": ("ascend", 8), "rocm:gfx942": ("wave", 6)}
"""Backend, and which share of the items runs here; `anyattn verify NAME --emulated` runs all."""


@pytest.mark.parametrize("host", HOSTS)
def test_the_kit_passes(host: str) -> None:
    name, share = HOSTS[host]
    with emulating(name, host):
        subject = Subject(declared(name, "cpu", host), "cpu", host)
        results = run_items(plan_kit(subject.declared).items[::share], subject)
    assert [f"{r.item.label()}: {r.why}" for r in results if r.why is not None] == []
    assert sum(r.passed for r in results) > 8


@cache
def _chosen(name: str) -> tuple[Subject, tuple[Item, ...]]:
    host = emulator_of(name).host
    subject = Subject(declared(name, "cpu", host), "cpu", host)
    return subject, plan_kit(subject.declared).items


FAULTS = [pytest.param(name, m, id=m.name) for name in ("ascend", "wave") for m in MUTANTS[name]]


@pytest.mark.parametrize(("name", "mutant"), FAULTS)
def test_faults_are_caught_by_name(name: str, mutant: Mutant) -> None:
    with emulating(name):
        subject, items = _chosen(name)
        if name == "ascend" and "padded" in mutant.name:  # a quick way to what can show it
            items = tuple(item for item in items if item.case.padding and item.case.sinks)
        caught = hunt_one(mutant, items, subject)
    assert caught.caught, hunt_text([caught])
