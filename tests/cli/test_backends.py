"""`anyattn backends`: the matrix, reasons in full, JSON."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import pytest

from anyattn import api
from anyattn.cli import backends as command
from anyattn.core.capabilities import Phase
from anyattn.errors import UnknownNameError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("ANYATTN_")]:
        monkeypatch.delenv(name)


def show(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(line.split())) == 0
    return capsys.readouterr().out


def as_json(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(show(f"{line} --json", capsys))
    return data


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()


def test_every_backend_has_a_row_with_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--assume cuda:sm90", capsys)
    for name in api.registry().names():
        assert len(row(text, name)) >= 1 + len(Phase)
    assert row(text, "torch_native")[1:5] == ["slow"] * 4
    assert row(text, "aiter")[1:6] == ["-", "-", "-", "-", "runs"]
    assert row(text, "flashmla")[2] in ("yes", "yes*")
    assert max(map(len, text.splitlines())) <= 130


def test_backends_that_run_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show("--assume rocm:gfx1100", capsys).splitlines()[3:]
    dead = [" - " in line and "yes" not in line and "slow" not in line for line in lines if " " in line]
    body = dead[: len(api.registry().names())]
    assert body == sorted(body)


def test_a_model_changes_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert row(show("--assume cuda:sm90", capsys), "flashmla")[2].startswith("yes")
    text = show("--assume cuda:sm90 --head-dim 80", capsys)
    assert row(text, "flashmla")[2] == "-"
    assert "for 32/8 heads of size 80; bfloat16" in text


def test_why_tells_reasons_and_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--assume cuda:sm90-flashinfer-python --why flashinfer", capsys)
    assert "library_missing" in text
    assert "allowed: flashinfer-python" in text
    assert "next: install flashinfer-python" in text
    assert "torch_native" not in text


def test_why_takes_old_names_and_suggests_for_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(DeprecationWarning, match="'nsa'"):
        assert show("--assume cuda:sm90 --why nsa", capsys).splitlines()[2].startswith("dsa:")
    with pytest.raises(UnknownNameError, match="did you mean 'flashinfer'"):
        show("--why flashinfr", capsys)


def test_json_has_every_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json("--assume ascend:910b", capsys)
    assert (data["host"]["platform"], data["request"]) == ("ascend", None)
    assert [b["backend"] for b in data["backends"]] == list(api.registry().names())
    for backend in data["backends"]:
        assert set(backend["phases"]) == {p.value for p in Phase}
        for entry in backend["phases"].values():
            assert bool(entry["reasons"]) is (entry["verdict"] != "accepted")
    data = as_json("--assume ascend:910b --sinks --why ascend", capsys)
    assert data["request"]["specs"][0]["sinks"] is True
    assert [b["backend"] for b in data["backends"]] == ["ascend"]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    text = show("--device cpu", capsys)
    assert row(text, "torch_native")[1:5] == ["yes"] * 4
    assert "*:" in text
    assert "yes*" not in text
