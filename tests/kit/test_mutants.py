"""The kit catches every deliberate fault, by a failure that names it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyattn.testing.checks import Subject
from anyattn.testing.mutants import MUTANTS, Mutant, MutantError, applied
from anyattn.testing.mutants.hunt import hunt, hunt_one, hunt_text
from anyattn.testing.plan import Item, plan_kit
from anyattn.testing.subject import open_subject

ROOT = Path(__file__).resolve().parents[2]
ALL = [mutant for mutants in MUTANTS.values() for mutant in mutants]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_subject("torch_native", "cpu")


@pytest.fixture(scope="module")
def items(subject: Subject) -> tuple[Item, ...]:
    return plan_kit(subject.declared).items


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 25
    assert len({m.report for m in ALL if m.report}) >= 10
    assert len({m.name for m in ALL}) == len(ALL)
    assert all(m.names and m.old != m.new for m in ALL)


@pytest.mark.parametrize("mutant", MUTANTS["torch_native"], ids=lambda m: m.name)
def test_caught_by_its_name(mutant: Mutant, subject: Subject, items: tuple[Item, ...]) -> None:
    caught = hunt_one(mutant, items, subject)
    assert caught.caught, hunt_text([caught])
    assert "__class__" not in caught.why, "the patch itself is broken"


@pytest.mark.interpreter
def test_triton_mutants_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="the portable extra isn't installed")
    command = [sys.executable, "-m", "anyattn.cli.main", "verify", "triton", "--device", "cpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--mutants", "--json"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=540
    )
    found = json.loads(done.stdout)
    survived = [(m["name"], m["why"], m["unnamed"]) for m in found if not m["caught"]]
    assert len(found) == len(MUTANTS["triton"])
    assert not survived
    assert done.returncode == 0


def test_the_code_is_whole_again(subject: Subject, items: tuple[Item, ...]) -> None:
    """Nothing of a mutant stays behind, also not in modules that were imported meanwhile."""
    mutant = MUTANTS["torch_native"][0]
    with applied(mutant):
        from anyattn.backends.reference import attend, torch_native

        assert attend.visible.__code__.co_filename.startswith("<mutant")
        assert torch_native.visible is attend.visible
    assert torch_native.visible is attend.visible
    assert not attend.visible.__code__.co_filename.startswith("<mutant")


def test_a_mutant_that_no_longer_fits_is_no_survivor_but_an_error(subject: Subject) -> None:
    mutant = MUTANTS["torch_native"][0]
    for other in (
        dataclasses.replace(mutant, old="no such text"),
        dataclasses.replace(mutant, where="anyattn.backends.reference.attend:gone"),
    ):
        with pytest.raises(MutantError), applied(other):
            pass
        (caught,) = hunt(subject, [other])
        assert not caught.caught
        assert "NOT APPLIED" in hunt_text([caught])


def test_a_harmless_change_survives(subject: Subject) -> None:
    """The hunt doesn't find what isn't there."""
    mutant = Mutant(
        name="nothing", where="anyattn.backends.reference.attend:visible", old="inside = gap < window",
        new="inside = window > gap", names=("window",),
    )  # fmt: skip
    (caught,) = hunt(subject, [mutant])
    assert not caught.caught
    assert caught.unnamed == 0
