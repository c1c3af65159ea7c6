"""Latent models on the stand-ins of their libraries: right, and faults in the calls are noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from anyattn.testing.emulators import EMULATORS, emulating, emulator_of
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_declared import latent_declared
from anyattn.testing.mla_judge import check_mla_case
from anyattn.testing.mutants.hunt import hunt_text
from anyattn.testing.mutants.latent import hunt_latent, latent_cases
from anyattn.testing.mutants.latent_calls import LATENT_MUTANTS
from anyattn.testing.mutants.patching import Mutant


@dataclass(frozen=True)
class Latents:
    """A backend on its stand-in, and the cases that it declares."""

    name: str
    host: str
    cases: Mapping[str, MLACase]


@pytest.fixture(scope="module", name="latents")
def _latents(request: pytest.FixtureRequest) -> Iterator[Latents]:
    name = request.param
    host = emulator_of(name, latent=True).host
    with emulating(f"{name}_mla" if f"{name}_mla" in EMULATORS else name, host):
        yield Latents(name, host, latent_cases(latent_declared(name, "cpu", host)))


@pytest.mark.parametrize("latents", ["flashmla", "cutedsl_mla", "fa3", "fa4", "aiter"], indirect=True)
def test_named_steps_are_right(latents: Latents) -> None:
    assert len(latents.cases) >= 3
    for case in latents.cases.values():
        report = check_mla_case(case, backend=latents.name, host=latents.host)
        assert report.passed, report


FAULTS = [pytest.param(name, m, id=m.name) for name, mutants in LATENT_MUTANTS.items() for m in mutants]


@pytest.mark.parametrize(("latents", "mutant"), FAULTS, indirect=["latents"])
def test_faults_are_caught_by_name(latents: Latents, mutant: Mutant) -> None:
    caught = hunt_latent(mutant, latents.cases, latents.name, "cpu", latents.host)
    assert caught.caught, hunt_text([caught])
