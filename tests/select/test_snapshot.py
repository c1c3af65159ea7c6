"""A changed default is a diff: every decision for every simulated host equals the checked-in text."""

from __future__ import annotations

import difflib

import pytest
from snapshot_lines import FOLDER, MODELS, decision_of, render

from anyattn.core.capabilities import Phase
from anyattn.core.select.decision import Degraded
from anyattn.detect.simulated import HOSTS

DENSE = [name for name in MODELS if name != "mla"]
RDNA = [h for h in HOSTS if h.startswith(("rocm:gfx11", "rocm:gfx12"))]


def backends(model: str, host: str) -> dict[Phase, str]:
    """Phase -> backend, phases that nobody serves left out."""
    decision = decision_of(model, host)
    choices = {phase: getattr(decision, phase.value) for phase in Phase}
    return {phase: choice.backend for phase, choice in choices.items() if choice is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_decisions_are_those_on_file(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    stored = path.read_text(encoding="utf-8") if path.exists() else ""
    now = render(name).splitlines()
    diff = "\n".join(difflib.unified_diff(stored.splitlines(), now, "on file", "now", lineterm="", n=1))
    assert not diff, f"decisions changed; if that is meant: python tests/select/update_snapshot.py\n{diff}"


def test_no_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.txt")} == set(MODELS)


@pytest.mark.parametrize("model", DENSE)
def test_a_dense_model_is_served_everywhere(model: str) -> None:
    for host in HOSTS:
        assert {Phase.PREFILL, Phase.DECODE} <= set(backends(model, host)), host


@pytest.mark.parametrize("model", DENSE)
def test_the_reference_is_called_slow_on_accelerators_and_not_on_cpus(model: str) -> None:
    for host in HOSTS:
        decision = decision_of(model, host)
        for choice in (decision.prefill, decision.decode):
            if choice.backend == "torch_native":
                assert isinstance(choice.verdict, Degraded) == (not host.startswith("cpu:")), host
                assert choice.built


@pytest.mark.parametrize("host", ["cuda:sm120", "cuda:sm121", "cuda:sm110"])
def test_no_sm100_kernel_leaves_sm100(host: str) -> None:
    for model in MODELS:
        decision = decision_of(model, host)
        for choice in (decision.prefill, decision.decode, decision.verify, decision.draft):
            assert choice is not None
            assert "trtllm-gen" not in choice.method
            assert choice.backend not in ("trtllm_mla", "cutedsl_mla")


@pytest.mark.parametrize("host", [*RDNA, "rocm:gfx90a"])
def test_aiter_stays_on_its_chips(host: str) -> None:
    for model in MODELS:
        assert "aiter" not in backends(model, host).values()


@pytest.mark.parametrize("host", [h for h in HOSTS if h.startswith("cpu:")] + ["ascend:310p"])
def test_mla_without_a_fast_kernel_is_the_references(host: str) -> None:
    assert set(backends("mla", host).values()) == {"torch_native"}
    assert decision_of("mla", host).prefill.built


@pytest.mark.parametrize("host", HOSTS)
def test_mla_is_answered_everywhere(host: str) -> None:
    assert set(backends("mla", host)) == set(Phase)


@pytest.mark.parametrize("model", MODELS)
def test_phases_share_the_pool(model: str) -> None:
    """Whatever was chosen reads the chosen page, layout and dtype."""
    for host in HOSTS:
        decision = decision_of(model, host)
        for choice in filter(None, (decision.prefill, decision.decode, decision.verify, decision.draft)):
            assert decision.kv.layout in choice.row.layouts, host
            assert decision.kv.page_size % choice.kernel_page == 0, host
            assert decision.kv.dtype in choice.row.kv_dtypes, host
