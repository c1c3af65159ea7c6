"""A run end to end on a CPU, what is written of it, and what a reader is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from anyattn.bench import engine, run
from anyattn.bench.build import build_here, shares
from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, NotHere
from anyattn.bench.document import load, new_document, save
from anyattn.bench.engine import DeviceLost, Options, time_cell
from anyattn.bench.growth import Line, measure_growth, text
from anyattn.bench.harness.candidate import Candidate
from anyattn.bench.harness.limits import MachineLimits
from anyattn.bench.harness.timers import CudaTimer
from anyattn.bench.plot import plot
from anyattn.bench.run import Budget, run_cells
from anyattn.bench.scene import Field, copies_of, room_for
from anyattn.bench.summary import CHOICE, against_peers, cell_text, policies, replay, summary
from anyattn.cli.bench import _without
from anyattn.cli.main import main
from anyattn.errors import ConfigError

CPU = torch.device("cpu")
SMALL = {"num_q": 4, "num_kv": 2, "dim": 32, "v_dim": 32, "dtype": "float32", "kv_dtype": "float32"}
DECODE = Cell("decode", "decode", (20, 20), (1, 1), **SMALL)  # type: ignore[arg-type]
EXTEND = Cell("extend", "extend", (9, 0), (4, 7), **SMALL)  # type: ignore[arg-type]
QUICK = Options(rounds=2, sample_seconds=0.0)


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_limits", lambda *_: MachineLimits(20.0, 10.0, 0.5, "float32"))


def entry(name: str, times: dict[str, float], **fields: Any) -> dict[str, Any]:
    """An entry with made-up times: `peer …` are peers."""
    cell = DECODE.to_json() | {"name": name} | fields
    results = [
        {"name": n.removeprefix("peer "), "kind": "peer" if n.startswith("peer") else "backend",
         "median_s": t, "spread": 0.01, "rounds": 3, "gb_s": 1.0, "tflop_s": 0.001, "error": 0.0}
        for n, t in times.items()
    ]  # fmt: skip
    return {"cell": cell, "mode": "graph", "copies": 2, "choice": "a", "results": results, "skipped": []}


def test_a_run(tmp_path: Path) -> None:
    path, shown = tmp_path / "out.json", []
    document = run_cells([DECODE, EXTEND], CPU, QUICK, path=path, show=shown.append)
    assert document == load(path)
    assert [e["cell"]["name"] for e in document["cells"]] == [DECODE.name, EXTEND.name]
    assert shown == document["cells"]
    names = {r["name"]: r for r in document["cells"][0]["results"]}
    assert {"torch_native", "torch SDPA, gathered", "torch SDPA, contiguous KV"} <= set(names)
    ours = names["torch_native"]
    assert ours["kind"] == "backend"
    assert ours["rounds"] == 2
    assert 0 < ours["error"] < 1e-5
    assert (ours["page"], ours["layout"]) == (16, "NHD")
    assert ours["gb_s"] == pytest.approx(DECODE.work().bytes / ours["median_s"] / 1e9)
    assert ours["of_limit"] > 0
    assert not names["torch SDPA, contiguous KV"]["counts"]
    told = summary(document)
    assert "copy 20 GB/s, read 10 GB/s" in told
    assert "torch_native" in told
    assert "not compared" in cell_text(document["cells"][0])


def test_going_on_with_a_result_and_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    run_cells([DECODE], CPU, QUICK, path=path)
    again = run_cells([DECODE, EXTEND], CPU, QUICK, path=path, document=load(path))
    assert len(again["cells"]) == 2, "what is there isn't timed again"
    late = run_cells([DECODE, EXTEND], CPU, QUICK, budget=Budget(0.0, 1.0))
    assert late["left_out"] == [DECODE.name, EXTEND.name]
    assert late["cells"] == []
    assert "Left out for time" in summary(late)
    both = dataclasses.replace(DECODE, modes=("graph", "eager"))
    monkeypatch.setattr(
        run, "time_cell", lambda cell, *_: [engine.Timed(cell, m, 0, None) for m in cell.modes]
    )
    added = run_cells([both], CPU, QUICK, document=load(path))["cells"][2:]
    assert [entry["mode"] for entry in added] == ["graph"], "only the mode that is missing"


def contender(name: str, prepare: Any) -> Contender:
    return Contender(name, "peer", prepare)


def test_whoever_fails_or_is_wrong_is_told_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(field: Field) -> Entrant:
        raise NotHere("not installed")

    def wrong(field: Field) -> Entrant:
        scene = field.paged(16)
        return Entrant([lambda: field.q * 0.5] * 2, scene)

    monkeypatch.setattr(
        engine, "peers_of", lambda *_: [contender("absent", absent), contender("wrong", wrong)]
    )
    (timed,) = time_cell(DECODE, CPU, QUICK)
    skipped = dict(timed.skipped)
    assert skipped["absent"] == "NotHere: not installed"
    assert "wrong: relative error" in skipped["wrong"]
    assert [c.name for c, *_ in timed.results] == ["torch_native"]
    assert timed.choice == "torch_native"


def test_only_and_skip() -> None:
    (timed,) = time_cell(
        DECODE, CPU, Options(rounds=2, sample_seconds=0.0, only=("torch*",), skip=("*SDPA*",))
    )
    assert [c.name for c, *_ in timed.results] == ["torch_native"]


def test_too_big_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "room_for", lambda _: 1000)
    (timed,) = time_cell(DECODE, CPU, QUICK)
    assert timed.results == []
    assert "are free" in timed.skipped[0][1]
    assert room_for(CPU) > 1 << 20
    assert 1 <= copies_of(DECODE, CPU) <= 4


def test_a_lost_device_is_saved_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise DeviceLost("kernel: illegal address")

    path = tmp_path / "out.json"
    monkeypatch.setattr(run, "time_cell", lost)
    with pytest.raises(DeviceLost):
        run_cells([DECODE, EXTEND], CPU, QUICK, path=path)
    (only,) = load(path)["cells"]
    assert "the device failed" in only["skipped"][0]["why"]


def test_ratios_policies_and_replay() -> None:
    vllm, sglang = "peer fa3, page 16 (vLLM's call)", "peer fa3, page 1 (SGLang's call)"
    entries = [
        entry("x", {"a": 1.0, "b": 2.0, "peer p": 1.5, vllm: 2.0, sglang: 4.0}),
        entry("y", {"a": 4.0, "b": 2.0, "peer p": 1.0, vllm: 2.0}),
    ]
    a = against_peers(entries)["decode, graph"]["a"]
    assert (a.count, a.worst, a.where) == (2, 0.25, "y graph")
    assert a.mean == pytest.approx((1.5 * 0.25) ** 0.5)
    rows = policies(entries)["decode, graph"]
    assert rows[f"{CHOICE} / vLLM's default"].mean == pytest.approx((2.0 * 0.5) ** 0.5)
    assert rows[f"{CHOICE} / SGLang's default"].count == 1
    assert rows["anyattn, best backend of this run / vLLM's default"].worst == 1.0
    assert rows[f"{CHOICE} / best backend of this run"].worst == 0.5
    assert rows[f"{CHOICE} / best of all"].worst == 0.25
    chat = [entry("s", {"a": 2.0, "b": 3.0}, workload="chat", weight=10.0),
            entry("t", {"a": 1.0}, workload="chat", weight=5.0)]  # fmt: skip
    day = replay(chat)
    assert day["a"] == 25.0
    assert "b" not in day, "it lacks a step"
    assert replay(entries) == {}


def test_roofline(tmp_path: Path) -> None:
    document = run_cells([DECODE], CPU, QUICK)
    plot(document, tmp_path / "roof.svg")
    tree = ElementTree.parse(tmp_path / "roof.svg")
    tips = [e.text for e in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == len(document["cells"][0]["results"])
    with pytest.raises(ConfigError, match="results and limits"):
        plot(new_document(CPU), tmp_path / "none.svg")


def test_files_that_are_no_results(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="schema"):
        load(path)
    with pytest.raises(ConfigError, match="can't be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be written"):
        save({}, tmp_path / "nowhere" / "x.json")


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_CHECKS", "host")  # requests share slots there, which full checks refuse
    line = Line.through([1, 2, 4], [3.0, 5.0, 9.0])
    assert (line.base, line.slope) == (pytest.approx(1.0), pytest.approx(2.0))
    found = measure_growth(
        CPU, only=("request_table", "page_*", "token_csr", "torch_native"), skip=("token*",),
        batches=(1, 4), contexts=(64, 128), rounds=2,
    )  # fmt: skip
    assert [row["name"] for row in found["rows"]] == ["request_table", "page_csr", "torch_native"]
    assert not found["skipped"]
    for row in found["rows"]:
        assert all(us > 0 for us in row["host_by_batch"]["us"] + row["device_by_context"]["us"])
    assert "torch_native" in text(found)


class Replays(CudaTimer):
    """A graph timer without a GPU: the second candidate can't be captured."""

    def __init__(self) -> None:
        super().__init__(CPU, graph=True)
        self.asked: list[str] = []

    def prepare(self, candidate: Candidate) -> None:
        self.asked.append(candidate.name)
        if len(self.asked) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    def sample(self, candidate: Candidate, calls: int) -> float:
        return 1e-3


def test_whoever_cannot_be_captured_is_left_out_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Replays()
    monkeypatch.setattr(engine, "make_timer", lambda device, graph: timer if graph else None)
    field = Field(DECODE, CPU)
    scene = field.paged(16)
    entrant = Entrant([lambda: field.q] * 2, scene)
    timed = engine.Timed(DECODE, "graph", 2, None)
    prepared = [(contender(name, None), entrant, 0.0) for name in ("a", "b", "c")]
    engine._time(timed, prepared, CPU, QUICK)
    assert timer.asked == ["a", "b", "c"]
    assert [c.name for c, *_ in timed.results] == ["a", "c"]
    assert timed.skipped[0][0] == "b"
    assert "not under a graph: RuntimeError: operation not permitted" in timed.skipped[0][1]


def test_shares_and_arguments_of_builders() -> None:
    cells = [DECODE, EXTEND, DECODE]
    assert shares(cells, 2) == [[DECODE, DECODE], [EXTEND]]
    assert shares(cells, 8) == [[DECODE], [EXTEND], [DECODE]]
    assert _without(["bench", "--build", "4", "--quick", "--build=3"], "--build") == ["bench", "--quick"]
    said: list[str] = []
    build_here([DECODE], CPU, Options(rounds=2, skip=("torch_native",), say=said.append))
    assert not any(": torch_native:" in line for line in said)


def test_a_lost_device_goes_on_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, started = tmp_path / "out.json", []

    def lost(*_: object, **__: object) -> None:
        raise DeviceLost("kernel: illegal address")

    monkeypatch.setattr(run, "time_cell", lost)
    monkeypatch.setattr("os.execv", lambda *given: started.append(given) or 0)
    command = ["bench", "--device", "cpu", "--minutes", "5", "--cells", "window*", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["anyattn", *command])
    assert main(command) == 0
    assert started[0][1][3:][:3] == ["bench", "--device", "cpu"]
    assert started[0][1][-3:-1] == ["--resume", "--minutes"]
    assert "the device failed" in out.read_text()
    monkeypatch.undo()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "out.json"
    grid.write_text(
        "[cpu.decode]\npage = 16\ndtype = 'float32'\nheads = '4/2'\ndim = 32\n"
        "cells = [{ batch = 2, context = 20, quick = true }, { batch = 1, context = 9 }]\n"
    )
    base = ["bench", "--device", "cpu", "--grid", str(grid)]
    assert main([*base, "--list"]) == 0
    assert "decode-2x20-4/2-d32-p16-float32" in capsys.readouterr().out
    assert main([*base, "--quick", "--rounds", "2", "--skip", "flex*", "--json", str(out)]) == 0
    assert "geometric mean" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["cells"]) == 1
    assert main(["bench", "--from", str(out), "--defaults"]) == 0
    assert CHOICE in capsys.readouterr().out
    assert main(["bench", "--from", str(out), "--plot", str(tmp_path / "roof.svg")]) == 0
    assert (tmp_path / "roof.svg").exists()
    page = tmp_path / "page.md"
    assert main(["bench", "--from", str(out), "--markdown", str(page)]) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| decode-2x20")]
    assert len(rows) == 1
    assert rows[0].count("**") == 2, "the fastest that counts is in bold"
    assert main([*base, "--resume"]) == 2
    assert main([*base, "--workloads", "prefil"]) == 2
    assert main(["bench", "--device", "npu"]) == 2
