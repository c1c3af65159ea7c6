"""`fa3`, `fa4` and `hpc_ops` on stand-ins: the kit passes, and notices faults in their calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulating
from anyattn.testing.kit import run_items
from anyattn.testing.mutants import MUTANTS, Mutant
from anyattn.testing.mutants.hunt import hunt_one, hunt_text
from anyattn.testing.plan import Item, plan_kit

HOSTS = {
    "tokenspeed-fa3": ("fa3", "cuda:sm90-sglang-kernel-vllm"),
    "sglang-kernel": ("fa3", "cuda:sm90-tokenspeed-fa3-vllm"),
    "vllm": ("fa3", "cuda:sm90-sglang-kernel-tokenspeed-fa3"),
    "flash-attn-4": ("fa4", "cuda:sm90"),
    "flash-attn-4 on SM100": ("fa4", "cuda:sm100"),
    "hpc-ops": ("hpc_ops", "cuda:sm90"),
}
SHARE = 4  # every fourth item here; `anyattn verify NAME --emulated` runs all
CHOSEN = {"fa3": "tokenspeed-fa3", "fa4": "flash-attn-4", "hpc_ops": "hpc-ops"}


@pytest.fixture(params=HOSTS, name="subject")
def _subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name, host = HOSTS[request.param]
    with emulating(name, host):
        yield Subject(declared(name, "cpu", host), "cpu", host)


def test_the_kit_passes(subject: Subject) -> None:
    items = plan_kit(subject.declared).items[::SHARE]
    results = run_items(items, subject)
    assert len(results) > 15
    assert [f"{r.item.label()}: {r.why}" for r in results if r.why is not None] == []
    assert sum(r.passed for r in results) > 15


@pytest.fixture(scope="module", name="chosen")
def _chosen(request: pytest.FixtureRequest) -> Iterator[tuple[Subject, tuple[Item, ...]]]:
    name, host = HOSTS[CHOSEN[request.param]]
    with emulating(name, host):
        subject = Subject(declared(name, "cpu", host), "cpu", host)
        yield subject, plan_kit(subject.declared).items


FAULTS = [pytest.param(name, m, id=m.name) for name in CHOSEN for m in MUTANTS[name]]


@pytest.mark.parametrize(("chosen", "mutant"), FAULTS, indirect=["chosen"])
def test_faults_are_caught_by_name(mutant: Mutant, chosen: tuple[Subject, tuple[Item, ...]]) -> None:
    subject, items = chosen
    if "'s scale" in mutant.name or "scales" in mutant.name:  # a quick way to what can show it
        items = tuple(item for item in items if "float8" in item.case.kv_dtype)
    caught = hunt_one(mutant, items, subject)
    assert caught.caught, hunt_text([caught])


def test_tokenspeeds_operators_are_called_themselves() -> None:
    from anyattn.backends.cuda.flash_providers import load_flash
    from anyattn.core.facts import LibraryFacts

    with emulating("fa3"):
        library = load_flash(LibraryFacts("tokenspeed-fa3", "3.0.0"), 3)
    assert type(library.paged.call).__name__ == "ForwardOperator"
    assert library.schedule is not None
    assert type(library.schedule.call).__name__ == "SchedulerOperator"
    assert "out" in library.paged.names
