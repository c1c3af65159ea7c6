"""`flashinfer` and its relatives on the stand-in of their library: the kit passes, faults are noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulating
from anyattn.testing.emulators.flashinfer_common import host_reads
from anyattn.testing.judge import check_case
from anyattn.testing.kit import run_items
from anyattn.testing.mla_sweep import sweep
from anyattn.testing.mutants import MUTANTS, Mutant
from anyattn.testing.mutants.hunt import hunt_one, hunt_text
from anyattn.testing.plan import Item, plan_kit
from anyattn.testing.world import World

HOSTS = [
    ("flashinfer", "cuda:sm90"),
    ("trtllm_mha", "cuda:sm100"),
    ("trtllm_mha", "cuda:sm90"),
]
SHARE = 9  # every ninth item here; `anyattn verify NAME --emulated` runs all


@pytest.mark.parametrize(("name", "host"), HOSTS)
def test_the_kit_passes(name: str, host: str) -> None:
    with emulating(name, host):
        subject = Subject(declared(name, "cpu", host), "cpu", host)
        results = run_items(plan_kit(subject.declared).items[::SHARE], subject)
    assert [f"{r.item.label()}: {r.why}" for r in results if r.why is not None] == []
    assert sum(r.passed for r in results) >= 4


@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mla"])
def test_latent_steps_pass(name: str) -> None:
    with emulating(f"{name}_mla" if name == "flashinfer" else name) as emulator:
        outcome = sweep(name, "cpu", 3, 11, ["half"], emulator.host)
    assert outcome["failed"] == []
    assert outcome["emulated"] is True
    assert outcome["passed"] >= 1


@pytest.fixture(scope="module", name="hunted")
def _hunted() -> Iterator[tuple[Subject, tuple[Item, ...]]]:
    with emulating("flashinfer") as emulator:
        subject = Subject(declared("flashinfer", "cpu", emulator.host), "cpu", emulator.host)
        yield subject, plan_kit(subject.declared).items


@pytest.mark.parametrize("mutant", MUTANTS["flashinfer"], ids=lambda m: m.name)
def test_faults_are_caught_by_name(mutant: Mutant, hunted: tuple[Subject, tuple[Item, ...]]) -> None:
    subject, items = hunted
    if mutant.host:  # another chip's stand-in runs the code
        with emulating("flashinfer", mutant.host):
            subject = Subject(declared("flashinfer", "cpu", mutant.host), "cpu", mutant.host)
            caught = hunt_one(mutant, plan_kit(subject.declared).items, subject)
    else:
        caught = hunt_one(mutant, items, subject)
    assert caught.caught, hunt_text([caught])


CASES = {
    mode: Case(mode=mode, prefix_lens=(20, 7), extend_lens=(1, 1) if mode == "decode" else (3, 8),
               num_decode=0, page_size=8, num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64,
               dtype="bfloat16", kv_dtype="bfloat16")
    for mode in ("decode", "extend", "verify")
}  # fmt: skip


@pytest.mark.parametrize("mode", CASES)
@pytest.mark.parametrize("mask", [None, "random"])
def test_plans_read_nothing_back_from_the_device(mode: str, mask: str | None) -> None:
    """What the library copies to the host while planning lies there already."""
    if mask is not None and mode == "decode":
        pytest.skip("decode steps have no mask")
    case = dataclasses.replace(CASES[mode], mask=mask)
    with emulating("flashinfer") as emulator:
        world = World(case, backend="flashinfer", host=emulator.host)
        step = build_step(world)
        host_reads.clear()
        plan = world.backend.init_forward_metadata(step.batch)
        read = {name: x.untyped_storage().data_ptr() for name, x in host_reads}
    assert read
    device = {x.untyped_storage().data_ptr() for x in _tensors([plan, *plan.tables.values()])}
    assert len(device) > 2
    assert {name for name, place in read.items() if place in device} == set()


def _tensors(records: list[Any]) -> Iterator[torch.Tensor]:
    for record in records:
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if torch.is_tensor(value):
                yield value


def test_a_case_can_be_judged_by_itself() -> None:
    report = check_case(CASES["extend"], backend="flashinfer", emulated=True)
    assert report.passed
    assert report.error > 0
