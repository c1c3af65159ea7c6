"""The verifier of graphs on stand-ins: what it captures, what it finds, and how the command reports it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from anyattn.cli.main import main
from anyattn.core.capabilities import ModelKind
from anyattn.errors import GraphError, UnknownNameError
from anyattn.testing.emulators import emulating
from anyattn.testing.graph_checks import GRAPH_CHECKS
from anyattn.testing.graph_emulated import install_recordable
from anyattn.testing.graph_kit import GraphResult, GraphSubject, graph_subject, run_setup

Opened = Callable[..., GraphSubject]


@contextmanager
def standing_in(name: str, *, latent: bool = False) -> Iterator[GraphSubject]:
    with emulating(name):
        host = install_recordable(name, latent=latent).host
        yield graph_subject(name, "cpu", host, (ModelKind.MLA if latent else ModelKind.DENSE,))


def checked(subject: GraphSubject, name: str, checks: tuple[str, ...] = ()) -> list[GraphResult]:
    setup = next(s for s in subject.setups() if s.name == name)
    return list(run_setup(subject, setup, checks or tuple(GRAPH_CHECKS), replays=6))


def verdicts(results: list[GraphResult]) -> tuple[list[str], list[str]]:
    """Names of checks that passed, and all faults."""
    return [r.check for r in results if r.passed], [f for r in results for f in r.faults]


def test_every_declared_mode_is_captured() -> None:
    with standing_in("fa3") as subject:
        names = [setup.name for setup in subject.setups()]
    assert {"decode", "target_verify, chain", "draft_extend", "target_verify, tree (qlen_only)"} <= set(names)
    assert any("window" in name for name in names)
    assert any("sinks" in name for name in names)


def test_decode_keeps_every_promise() -> None:
    with standing_in("fa3") as subject:
        results = checked(subject, "decode")
    passed, faults = verdicts(results)
    assert not faults
    assert set(passed) == set(GRAPH_CHECKS) - {"mask", "beside-work"}
    skipped = {r.check: r.skipped for r in results if r.skipped}
    assert "chains have no mask" in skipped["mask"]
    assert "recorder" in skipped["beside-work"]


@pytest.mark.parametrize("form", ["full_mask", "qlen_only"])
def test_trees_keep_theirs(form: str) -> None:
    with standing_in("fa3") as subject:
        checks = ("replays", "mask", "padding", "limits", "addresses")
        results = checked(subject, f"target_verify, tree ({form})", checks)
    passed, faults = verdicts(results)
    assert not faults
    assert tuple(passed) == checks


def test_planning_libraries_are_planned_again() -> None:
    with standing_in("flashinfer") as subject:
        passed, faults = verdicts(checked(subject, "decode", ("replays", "host-syncs", "two-runners")))
        tree = next(s for s in subject.setups() if "tree" in s.name)
        (refused,) = run_setup(subject, tree, ("replays",))
    assert not faults
    assert passed == ["replays", "host-syncs", "two-runners"]
    assert "packs masks" in refused.skipped


def test_a_second_runner_leaves_the_first_ones_memory() -> None:
    with standing_in("trtllm_mha") as subject:
        passed, faults = verdicts(checked(subject, "draft_extend", ("two-runners", "refusals")))
    assert not faults
    assert passed == ["two-runners", "refusals"]


def test_latent_models_keep_theirs() -> None:
    with standing_in("flashmla", latent=True) as subject:
        passed, faults = verdicts(checked(subject, "decode of latents", ("replays", "read-done", "overlap")))
    assert not faults
    assert passed == ["replays", "read-done", "overlap"]


def test_no_graphs_is_an_error_that_says_where_there_are_some() -> None:
    with pytest.raises(GraphError, match=r"torch_native declares no graphs on cpu.*run it eagerly"):
        graph_subject("torch_native", "cpu")
    with pytest.raises(UnknownNameError, match="did you mean"):
        graph_subject("tritton", "cpu")


@pytest.fixture(name="hpc_ops")
def _hpc_ops() -> Iterator[None]:
    with emulating("hpc_ops"):
        yield


@pytest.mark.usefixtures("hpc_ops")
def test_the_command_reports_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "hpc_ops", "--graphs", "--emulated", "--cases", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["backend"], document["emulated"], document["failed"]) == ("hpc_ops", True, 0)
    assert document["passed"] == sum(r["passed"] for r in document["results"]) > 10


@pytest.mark.usefixtures("hpc_ops")
def test_the_command_fails_where_a_check_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAPH_CHECKS, "limits", f"{__name__}:_broken")
    assert main(["verify", "hpc_ops", "--graphs", "--emulated", "--cases", "1"]) == 1
    said = capsys.readouterr()
    assert "FAILED limits: too small" in said.out
    assert "FAILED limits of decode: too small" in said.err


def _broken(labs: object) -> list[str]:
    return ["too small"]


def test_options_of_other_verifications_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "fa3", "--graphs", "--emulated", "--full"]) == 2
    assert "leave --full out" in capsys.readouterr().err
