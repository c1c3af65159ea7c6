"""`anyattn diff`: tables, bench results, decisions, machines; exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anyattn
from anyattn.cli.main import main
from anyattn.core.measure.diff import diff_times
from anyattn.core.measure.from_bench import from_bench
from anyattn.core.measure.table import Timing
from anyattn.core.select.codec import to_plain

Save = Callable[[str, Any], str]


@pytest.fixture(name="save")
def _save(tmp_path: Path) -> Save:
    def save(name: str, data: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(data))
        return str(path)

    return save


def bench(
    triton: float, fa3: float, *, spread: float = 0.01, batch: int = 64, **fields: Any
) -> dict[str, Any]:
    """A result of one decode cell, times in microseconds."""
    cell = {
        "name": f"decode-{batch}x8k", "workload": "decode", "step": "decode", "batch": batch, "prefix": 8191,
        "new": 1, "num_q": 32, "num_kv": 8, "dim": 128, "v_dim": 128, "page": 16, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "window": None,
    }  # fmt: skip
    times = {"triton": triton, "fa3": fa3}
    results = [
        {"name": name, "kind": "backend", "median_s": value * 1e-6, "spread": spread}
        for name, value in times.items()
    ]
    results.append({"name": "FA3", "kind": "peer", "median_s": 400e-6, "spread": 0.0})
    head = {"schema": "anyattn.bench/1", "device": "Fake GPU", "arch": "cuda:x1", "date": "2026-11-29"}
    return (
        head
        | {
            "versions": {"torch": "2.13.0"},
            "cells": [{"cell": cell, "mode": "graph", "results": results, "skipped": []}],
        }
        | fields
    )


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["diff", *argv])
    found = capsys.readouterr()
    return code, found.out + found.err


# --- times -------------------------------------------------------------------------------------------


def times(**seconds: float) -> dict[str, Timing]:
    return {name: Timing(value, 0.01) for name, value in seconds.items()}


def test_a_winner_changes_only_beyond_the_noise() -> None:
    old = {"cell": times(a=1.0, b=1.1)}
    assert diff_times(old, {"cell": times(a=1.01, b=1.0)}).winners == ()
    (change,) = diff_times(old, {"cell": times(a=1.05, b=1.0)}).winners
    assert (change.old, change.new) == ("a", "b")
    assert change.ratio == pytest.approx(1 / 1.05)


def test_cells_of_one_side_are_listed_and_not_compared() -> None:
    found = diff_times({"x": times(a=1.0), "y": times(a=1.0)}, {"y": times(a=1.0), "z": times(a=9.0)})
    assert (found.cells, found.lost, found.added, found.times) == (1, ("x",), ("z",), ())


def test_means_are_told_by_backend() -> None:
    found = diff_times({"x": times(a=1.0), "y": times(a=1.0)}, {"x": times(a=2.0), "y": times(a=0.5)})
    assert found.means["a"].ratio == pytest.approx(1.0)
    assert {change.ratio for change in found.times} == {2.0, 0.5}


# --- files -------------------------------------------------------------------------------------------


def test_two_bench_results(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = save("old", bench(480, 500)), save("new", bench(520, 500, versions={"torch": "2.14.0"}))
    code, text = run(capsys, old, new)
    assert code == 0
    assert "version of torch: 2.13.0 -> 2.14.0" in text
    assert "winner of decode-64x8k graph: triton -> fa3 (0.962 of its time)" in text
    assert "1.083 x  triton in decode-64x8k graph (noise 2%)" in text
    assert "FA3 (peer)" in text
    assert "fa3                          1.000 x its time" in text


def test_a_regression_fails_where_it_is_asked_to(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = save("old", bench(480, 500)), save("new", bench(520, 500))
    code, text = run(capsys, old, new, "--fail-on-regression", "5")
    assert (code, text.splitlines()[-1]) == (1, "1 regressions of more than 5 %, 0 times gone")
    assert run(capsys, old, new, "--fail-on-regression", "10")[0] == 0
    assert run(capsys, new, old, "--fail-on-regression", "5")[0] == 0, "faster is no regression"
    loud = save("loud", bench(520, 500, spread=0.1))
    assert run(capsys, old, loud, "--fail-on-regression", "5")[0] == 0, "8 % is within its noise"


def test_a_backend_without_a_time_any_more_is_a_regression(
    save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = bench(480, 500)
    cell = broken["cells"][0]
    cell["results"] = [r for r in cell["results"] if r["name"] != "triton"]
    old, new = save("old", bench(480, 500)), save("new", broken)
    code, text = run(capsys, old, new, "--fail-on-regression", "5")
    assert (code, text.splitlines()[-1]) == (1, "0 regressions of more than 5 %, 1 times gone")
    assert "gone    triton in decode-64x8k graph" in text
    assert run(capsys, old, new, "--fail-on-change")[0] == 1
    assert run(capsys, new, old, "--fail-on-regression", "5")[0] == 0, "a new one is none"


def test_two_tables_as_json(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    old = save("old", from_bench(bench(480, 500)).to_json())
    new = save("new", from_bench(bench(600, 500, device="Other GPU")).to_json())
    code, text = run(capsys, old, new, "--json", "--fail-on-regression", "5")
    found = json.loads(text)
    assert code == 1
    assert (found["schema"], found["kind"], found["changed"]) == ("anyattn.diff/1", "table", True)
    assert {"what": "device", "old": "Fake GPU", "new": "Other GPU"} in found["facts"]
    assert [change["backend"] for change in found["regressions"]] == ["triton"]
    assert found["times"]["winners"][0]["new"] == "fa3"


def test_the_same_file_twice_changes_nothing(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    one = save("one", bench(480, 500))
    code, text = run(capsys, one, one, "--fail-on-change", "--fail-on-regression", "0")
    assert code == 0
    assert "unchanged" in text
    assert "winner" not in text


def test_two_decisions(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    hosts = ("cuda:sm120+flashinfer-python==0.7.2", "cuda:sm120-flashinfer-python")
    decisions = [anyattn.select(spec, dtype="bfloat16", host=host).to_json() for host in hosts]
    old, new = (save(name, d) for name, d in zip(("old", "new"), decisions, strict=True))
    code, text = run(capsys, old, new, "--fail-on-change")
    assert code == 1
    assert "decode backend: flashinfer -> " in text
    assert "flashinfer in decode: accepted -> rejected (library_missing" in text
    assert "library flashinfer-python: 0.7.2, unknown -> nothing" in text
    assert run(capsys, old, old, "--fail-on-change") == (0, f"{old} -> {old}\n  no difference\n")


def test_two_machines(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    from anyattn.detect import simulate

    old = save("old", to_plain(simulate("cpu:avx2")))
    new = save("new", to_plain(simulate("cpu:avx512")))
    code, text = run(capsys, old, new, "--fail-on-change")
    assert code == 1
    assert "arch: avx2 -> avx512" in text
    assert "feature avx512f: nothing -> there" in text
    assert main(["doctor", "--assume", "cpu:avx2", "--json"]) == 0
    doctor = save("doctor", json.loads(capsys.readouterr().out))
    assert run(capsys, doctor, doctor)[1].endswith("no difference\n")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "anyattn.bench/2"}'])
def test_other_files_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    code, said = run(capsys, str(path), str(path))
    assert code == 2
    assert "a file to compare" in said
    assert "lists the options" not in said


def test_what_does_not_compare_is_refused(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(480, 500)
    table, bare = from_bench(result).to_json(), {"platform": "cpu", "arch": "avx2"}
    code, said = run(capsys, save("a", result), save("b", table))
    assert code == 2
    assert "files of two kinds" in said
    assert "Next: give two files that the same command wrote" in said
    code, said = run(capsys, save("c", bare), save("d", bare), "--fail-on-regression", "5")
    assert code == 2
    assert "two measured tables or bench results" in said
    code, said = run(capsys, save("e", {"schema": "anyattn.bench/1", "cells": 3}), save("f", result))
    assert code == 2
    assert "fields of a bench result" in said


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_a_limit_that_nothing_could_exceed_is_refused(
    limit: str, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = run(
        capsys, save("a", bench(480, 500)), save("b", bench(900, 500)), f"--fail-on-regression={limit}"
    )
    assert code == 2
    assert "a percentage >= 0" in said


def test_a_gate_that_compares_nothing_is_refused(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    files = save("a", bench(480, 500)), save("b", bench(480, 500, batch=32))
    assert run(capsys, *files)[0] == 0
    code, said = run(capsys, *files, "--fail-on-regression", "5")
    assert code == 2
    assert "nothing to compare; asked: 0 cells in both" in said


@pytest.mark.parametrize(
    "broken",
    [{"candidates": 5}, {"host": 3}, {"decode": [1]}, {"request": None}, {"kv": None}, {"versions": 1}],
)
def test_a_decision_that_somebody_edited(
    broken: dict[str, Any], save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
    data = anyattn.select(spec, dtype="float32", device="cpu").to_json()
    code, said = run(capsys, save("a", data), save("b", data | broken))
    assert code == 2
    assert "fields of a decision" in said
    assert "b.json" in said


@pytest.mark.parametrize("broken", [{"machine": 3}, {"libraries": [{}]}, {"backends": 7}])
def test_a_machine_that_somebody_edited(
    broken: dict[str, Any], save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"machine": {"platform": "cpu"}, "libraries": [], "backends": []}
    code, said = run(capsys, save("a", data), save("b", data | broken))
    assert code == 2
    assert "fields of a machine" in said
