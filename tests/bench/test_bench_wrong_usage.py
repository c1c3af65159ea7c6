"""What `anyattn bench` refuses before it measures: options, saved results, files; and Ctrl-C."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anyattn.bench import run
from anyattn.bench.cells import Cell
from anyattn.bench.document import load, new_document, save
from anyattn.bench.outputs import check_file
from anyattn.cli.main import main
from anyattn.errors import ConfigError

CPU = torch.device("cpu")
CELL = Cell("decode", "decode", (20, 20), (1, 1), num_q=4, num_kv=2, dim=32, v_dim=32, dtype="float32",
            kv_dtype="float32")  # fmt: skip
GRID = (
    "[cpu.decode]\npage = 16\ndtype = 'float32'\nheads = '4/2'\ndim = 32\n"
    "cells = [{ batch = 2, context = 20 }, { batch = 1, context = 9 }]\n"
)


def result() -> dict[str, Any]:
    """A sound result of two backends in one cell."""
    document = new_document(CPU, commit="abc")
    document["limits"] = {"copy_gb_s": 2.0, "read_gb_s": 1.0, "gemm_tflop_s": 0.1, "dtype": "float32"}
    rows = [
        {"name": name, "kind": "backend", "median_s": 1e-3, "spread": 0.01, "gb_s": 1.0, "tflop_s": 0.01}
        for name in ("a", "b")
    ]
    entry = {
        "cell": CELL.to_json(),
        "mode": "eager",
        "copies": 2,
        "choice": "a",
        "results": rows,
        "skipped": [],
    }
    return document | {"cells": [entry]}


def first(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["cells"][0]["results"][0]
    return found


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "no cells": lambda d: d.pop("cells"),
    "cells are no list": lambda d: d.update(cells={}),
    "cells of text": lambda d: d.update(cells=["x"]),
    "no versions": lambda d: d.pop("versions"),
    "no arch": lambda d: d.pop("arch"),
    "half of the limits": lambda d: d["limits"].pop("read_gb_s"),
    "no median": lambda d: first(d).pop("median_s"),
    "NaN": lambda d: first(d).update(median_s=float("nan")),
    "negative": lambda d: first(d).update(median_s=-1.0),
    "zero": lambda d: first(d).update(median_s=0),
    "text": lambda d: first(d).update(median_s="1"),
    "units of text": lambda d: d.update(units="132"),
    "a third kind": lambda d: first(d).update(kind="friend"),
    "no size": lambda d: d["cells"][0]["cell"].pop("dim"),
    "no name": lambda d: d["cells"][0]["cell"].pop("name"),
    "no requests": lambda d: d["cells"][0]["cell"].update(batch=0),
    "a step that isn't": lambda d: d["cells"][0]["cell"].update(step="dance"),
    "a mode that isn't": lambda d: d["cells"][0].update(mode="dance"),
    "limits without a dtype": lambda d: d["limits"].pop("dtype"),
    "a workload that is a number": lambda d: d["cells"][0]["cell"].update(workload=3),
    "a choice that is a list": lambda d: d["cells"][0].update(choice=[]),
    "no end of tokens": lambda d: d["cells"][0]["cell"].update(prefix=float("inf")),
    "a rate of text": lambda d: first(d).update(of_limit="x"),
    "a best time below zero": lambda d: first(d).update(best_s=-1.0),
    "no rounds": lambda d: first(d).update(rounds=-1),
    "a page of text": lambda d: first(d).update(page="x"),
    "a dtype that isn't": lambda d: d["cells"][0]["cell"].update(dtype="float7"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fields_that_do_not_fit(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, document = tmp_path / "x.json", copy.deepcopy(result())
    save(document, path)
    assert load(path) == document, "sound before"
    BROKEN[name](document)
    save(document, path)
    assert main(["bench", "--from", str(path), "--json"]) == 2
    found = capsys.readouterr()
    assert "fields of a bench result" in found.err
    assert f"asked: {path}: " in found.err
    assert "Next: measure again" in found.err
    assert found.out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--minutes nan", "allowed: a number > 0"),
        ("--minutes 0", "allowed: a number > 0"),
        ("--minutes -1", "allowed: a number > 0"),
        ("--rounds 1", "--rounds; asked: 1; allowed: >= 2"),
        ("--threads -3", "--threads; asked: -3; allowed: >= 1"),
        ("--build 0", "--build; asked: 0; allowed: >= 1"),
        ("--modes eagre", "did you mean 'eager'?"),
        ("--modes graph", "no cell is left"),
        ("--merge", "add --write TABLE"),
        ("--merge --write {tmp}/grid.toml", "measured table can't be read"),
        ("--only nobody", "nobody takes part; asked: --only nobody --skip (nobody); allowed: names or"),
        ("--build-only --only nobody", "torch_native"),
        ("--skip *", "nobody takes part; asked: --only (all) --skip *"),
        ("--growth --only nobody", "nobody takes part"),
        ("--json {tmp}/none/x.json", "--json can't be written"),
        ("--grid {tmp}/none.toml", "--grid can't be read; asked: {tmp}/none.toml: "),
        ("--json {tmp}", "a folder"),
        ("--markdown {tmp}/none/x.md", "--markdown can't be written"),
        ("--plot {tmp}/none/x.svg", "--plot can't be written"),
        ("--write {tmp}/none/x.json", "--write can't be written"),
        ("--write {tmp}/grid.toml/", "--write can't be written"),
        ("--growth --cells x", "--growth has no cells; asked: --cells; allowed: --device, --threads"),
        ("--growth --quick --minutes 3", "asked: --quick, --minutes"),
        ("--skip zzz", "--skip names nobody; asked: zzz; allowed: names or patterns of"),
        ("--growth --skip zzz", "--skip names nobody; asked: zzz"),
        ("--growth --plot x.svg", "--growth gives no result; asked: --plot"),
        ("--list --write t.json", "--list gives no result; asked: --write"),
        ("--from r.json --only a --quick", "--from measures nothing; asked: --only, --quick"),
    ],
)
def test_options_that_cannot_be(
    options: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def growth(*_: object, **__: object) -> dict[str, Any]:
        return {"rows": [], "skipped": []}

    monkeypatch.setattr(run, "run_cells", lambda *_, **__: pytest.fail("nothing is measured"))
    monkeypatch.setattr("anyattn.bench.growth.measure_growth", growth)
    monkeypatch.setattr(run, "_limits", lambda *_: None)
    (tmp_path / "grid.toml").write_text(GRID)
    given = options.format(tmp=tmp_path).split()
    grid = [] if "--growth" in given else ["--grid", str(tmp_path / "grid.toml")]
    where = [] if "--from" in given else ["--device", "cpu", *grid]
    assert main(["bench", *where, *given]) == 2
    assert words.format(tmp=tmp_path) in capsys.readouterr().err


def test_a_result_of_another_machine_or_version_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, grid = tmp_path / "x.json", tmp_path / "grid.toml"
    grid.write_text(GRID)
    given = ["bench", "--device", "cpu", "--grid", str(grid), "--resume", "--json", str(path)]
    save(result() | {"device": "NVIDIA H200"}, path)
    before = path.read_text()
    assert main(given) == 2
    assert "the result is of another device; asked: NVIDIA H200" in capsys.readouterr().err
    document = result()
    document["versions"] |= {"torch": "1.0"}
    save(document, path)
    assert main(given) == 2
    assert "the result is of other versions; asked: torch 1.0; allowed: torch 2" in capsys.readouterr().err
    save(result() | {"device": "NVIDIA H200"}, path)
    assert path.read_text() == before


def test_ctrl_c_says_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_limits", lambda *_: None)
    monkeypatch.setattr(run, "time_cell", stop)
    path, grid = tmp_path / "x.json", tmp_path / "grid.toml"
    grid.write_text(GRID)
    given = ["bench", "--device", "cpu", "--grid", str(grid)]
    assert main([*given, "--json", str(path)]) == 130
    assert f"interrupted: {path} has what was timed; --resume goes on" in capsys.readouterr().err
    assert load(path)["cells"] == []
    assert main([*given, "--json"]) == 130
    found = capsys.readouterr()
    assert "nothing is kept without --json FILE" in found.err
    assert found.out == ""


def test_a_table_needs_the_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "x.json", tmp_path / "t.json"
    save(result() | {"arch": "weird"}, path)
    assert main(["bench", "--from", str(path), "--write", str(table)]) == 2
    assert "arch of a bench result; asked: 'weird'; allowed: platform:arch" in capsys.readouterr().err
    assert not table.exists()
    save(result() | {"arch": "sm90"}, path)
    assert main(["bench", "--from", str(path), "--write", f"{tmp_path}/new/folder/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["arch"] == "sm90"
    (written,) = (tmp_path / "new" / "folder").iterdir()
    assert json.loads(written.read_text())["arch"] == "cuda:sm90"


def test_a_file_that_is_there_is_fine(tmp_path: Path) -> None:
    check_file("--json", tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{}")
    check_file("--json", tmp_path / "x.json")
    with pytest.raises(ConfigError, match="no folder"):
        check_file("--json", tmp_path / "y" / "x.json")


def test_a_list_goes_where_json_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "list.json"
    grid.write_text(GRID)
    given = ["bench", "--device", "cpu", "--grid", str(grid), "--list", "--json"]
    assert main([*given, str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_a_run_that_has_nothing_to_go_on_with_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "x.json"
    grid.write_text(GRID)
    monkeypatch.setattr(run, "_limits", lambda *_: None)
    args = ["bench", "--device", "cpu", "--grid", str(grid), "--rounds", "2", "--only", "torch_native"]
    args += ["--resume", "--json", str(out)]
    assert main(args) == 0
    assert f"--resume: {out} isn't there, so all cells are timed" in capsys.readouterr().err
    assert main(args) == 0
    assert "isn't there" not in capsys.readouterr().err


def test_a_name_that_nobody_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    args = ["bench", "--device", "cpu", "--grid", str(tmp_path / "grid.toml"), "--rounds", "2", "--no-peers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_limits", lambda *_: None)
        assert main([*args, "--json", "--only", "torch_native,trition", "--skip", "fa3,tritn"]) == 0
    found = capsys.readouterr()
    assert "--only trition: nobody here has that name" in found.err
    assert "--only torch_native" not in found.err
    assert "--skip tritn: nobody has that name" in found.err
    assert "--skip fa3" not in found.err, "not here, but a backend"
    assert {row["name"] for cell in json.loads(found.out)["cells"] for row in cell["results"]} == {
        "torch_native"
    }
