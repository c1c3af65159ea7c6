"""`anyattn matrix` on a checkout of its own: record, loss, reason; lanes that can't be."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anyattn.catalog import records
from anyattn.cli.main import main
from anyattn.cli.matrix_results import Result, load_results, summarise
from anyattn.cli.matrix_support import cells_of, lost_cells, read_csv, to_csv
from anyattn.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
WHEN = ("--date", "2026-11-28", "--commit", "0123456789abcdef")


def document(
    passed: int = 9, failed: int = 0, kernels: str = "native", target: str = "cuda:sm90"
) -> dict[str, Any]:
    """What `anyattn verify triton --json` prints."""
    return {
        "backend": "triton",
        "host": {
            "target": target,
            "device": "cuda",
            "name": "NVIDIA H200",
            "kernels": kernels,
            "versions": {"python": "3.11.7", "torch": "2.14.1", "triton": "3.8.0"},
        },
        "cases": passed + failed + 1,
        "passed": passed,
        "failed": [{"name": f"case-{i}", "check": "numbers", "case": "", "why": ""} for i in range(failed)],
        "skipped": [{"case": "", "why": "needs a friend"}],
        "worst_error": {"a/b/c": 1e-3, "d/e/f": 2e-3},
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with lanes and no results, whose tables are current."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "lanes.toml", tmp_path / "ci")
    assert main(["matrix", "update", "--root", str(tmp_path)]) == 0
    return tmp_path


def record(checkout: Path, data: dict[str, Any], *options: str) -> int:
    file = checkout / "result.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return main(["matrix", "record", str(file), *(options or WHEN), "--root", str(checkout)])


def status(checkout: Path, target: str = "cuda:sm90") -> str:
    cells = read_csv((checkout / "ci/support.csv").read_text(encoding="utf-8"))
    platform, _, arch = target.partition(":")
    return next(c.status for c in cells if c.key == ("triton", "dense", platform, arch))


def test_a_result_becomes_a_cell(checkout: Path) -> None:
    assert status(checkout) == "untested"
    assert record(checkout, document()) == 0
    assert status(checkout) == "passing"
    (summary,) = load_results(checkout / "ci/results")
    assert (summary.cells, summary.skipped, summary.worst_error) == ({"cuda:sm90": (9, 0)}, 1, 2e-3)
    page = (checkout / "docs/support.md").read_text(encoding="utf-8")
    line = (
        "`triton` dense, sm90: ran on it: 9 of 9 (2026-11-28, commit 0123456789; torch 2.14.1, triton 3.8.0)"
    )
    assert line in page


def test_a_lost_cell_is_written_with_a_reason_alone(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(checkout, document())
    later = ("--date", "2026-11-29", "--commit", "fedcba9876")
    assert record(checkout, document(failed=2), *later) == 1
    assert "triton dense cuda:sm90: passing -> failing" in capsys.readouterr().err
    assert status(checkout) == "passing"
    assert main(["matrix", "check", "--root", str(checkout)]) == 1
    assert main(["matrix", "update", "--reason", "a fault of triton 3.8", "--root", str(checkout)]) == 0
    assert status(checkout) == "failing"
    rows = list(csv.DictReader((checkout / "ci/changes.csv").open(encoding="utf-8")))
    assert rows[-1]["what"] == "triton dense cuda:sm90"
    assert (rows[-1]["before"], rows[-1]["after"]) == ("passing", "failing")
    assert rows[-1]["reason"] == "a fault of triton 3.8"
    assert main(["matrix", "check", "--root", str(checkout)]) == 0


def test_a_changed_default_is_written_with_a_reason_alone(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkout / "ci/defaults.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("dense,cpu:generic,float32,torch_native", "dense,cpu:generic,float32,other"))
    assert main(["matrix", "update", "--root", str(checkout)]) == 1
    told = capsys.readouterr().err
    assert "dense on cpu:generic: other / " in told
    assert "--reason" in told
    assert main(["matrix", "update", "--reason", "measured", "--root", str(checkout)]) == 0
    assert path.read_text(encoding="utf-8") == text


def test_a_backend_that_goes_takes_its_cells_along_as_losses() -> None:
    (triton,) = (record for record in records() if record.name == "triton")
    before = cells_of([triton], ())
    assert read_csv(to_csv(before)) == before
    assert {after for _, _, after in lost_cells(before, ())} == {"gone"}
    assert not lost_cells(before, before)


@pytest.mark.parametrize(
    ("how", "target", "expected"),
    [
        ("native", "cuda:sm90", "passing"),
        ("emulated", "cuda:sm90", "emulated"),
        ("interpreted", "cpu:avx512", "emulated"),
        ("compiled", "cuda:sm90", "cross-compiled"),
    ],
)
def test_words_follow_how_it_ran(how: str, target: str, expected: str) -> None:
    result = Result(
        backend="triton", models="dense", how=how, cells={target: (3, 0)}, date="2026-11-28", commit="0123456"
    )
    cells = {
        c.architecture: c
        for c in cells_of(records(), [result])
        if (c.backend, c.models) == ("triton", "dense")
    }
    assert cells["sm90"].status == expected
    # The interpreter says nothing of a chip, so it counts for all; the rest only for the chip that it names.
    assert cells["sm80"].status == ("emulated" if how == "interpreted" else "untested")


def test_a_failure_anywhere_outweighs_what_passed() -> None:
    common = {"backend": "triton", "models": "dense", "date": "2026-11-28", "commit": "0123456"}
    results = [
        Result(how="native", cells={"cuda:sm90": (9, 0)}, **common),
        Result(how="compiled", cells={"cuda:sm90": (9, 1)}, **common),
    ]
    cell = next(c for c in cells_of(records(), results) if c.key == ("triton", "dense", "cuda", "sm90"))
    assert cell.status == "failing"
    assert "compiled for it: 9 of 10" in cell.evidence


LATENT: dict[str, object] = {
    "backend": "flashmla", "kind": "mla", "target": "cuda:sm90", "cases": 8, "passed": 7, "left_out": 2,
    "seconds": 1.0, "failed": [{"case": "x", "why": "y"}], "worst": {"bf16": 1e-3}, "emulated": True,
}  # fmt: skip


def test_other_documents() -> None:
    (summary,) = summarise(LATENT, date="2026-11-28", commit="0123456")
    assert (summary.models, summary.how, summary.cells) == ("mla", "emulated", {"cuda:sm90": (7, 1)})
    compiled = {
        "versions": {"triton": "3.7.1"},
        "configurations": [
            {"entry": "decode/d128", "target": "sm_90", "ok": True},
            {"entry": "decode/d64", "target": "sm_90", "ok": False},
            {"entry": "decode/d128", "target": "gfx942", "ok": True},
            {"entry": "mla-decode/576", "target": "sm_90", "ok": True},
        ],
    }
    dense, mla = summarise(compiled, date="2026-11-28", commit="0123456")
    assert dense.cells == {"cuda:sm90": (1, 1), "rocm:gfx942": (1, 0)}
    assert (mla.models, mla.cells) == ("mla", {"cuda:sm90": (1, 0)})
    assert dense.backend == "triton"
    own = {**compiled, "backend": "wave", "configurations": compiled["configurations"][2:3]}
    (summary,) = summarise(own, date="2026-11-28", commit="0123456")
    assert (summary.backend, summary.how, summary.cells) == ("wave", "compiled", {"rocm:gfx942": (1, 0)})


@pytest.mark.parametrize("date", ["2026-13-45", "2999-01-01", "20261130", "yesterday"])
def test_days_that_cannot_be(date: str) -> None:
    with pytest.raises(ConfigError, match="--date"):
        summarise(LATENT, date=date, commit="0123456")


@pytest.mark.parametrize(
    "change",
    [
        {"cases": 0, "passed": 0, "failed": []},
        {"passed": -1},
        {"passed": "7"},
        {"worst": {"bf16": float("nan")}},
        {"versions": {"torch": 2}},
    ],
    ids=str,
)
def test_a_run_that_judged_nothing_is_no_result(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="a result that can't be read"):
        summarise(LATENT | change, date="2026-11-28", commit="0123456")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["record"], "RESULT.json … --date YYYY-MM-DD --commit HASH"),
        (["recrod"], "did you mean 'record'?"),
        (["update", "x.json"], "with `anyattn matrix record` alone"),
        (["--format", "gitlub"], "did you mean 'git"),
        (["record", "nowhere.json", *WHEN], "a result that can't be read"),
        (["--root", "nowhere"], "run it in a checkout"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('kind = "emulate"', 'kind = "emulated"', "did you mean 'emulate'?"),
        ('"flashinfer", "fa3"', '"flashinfr", "fa3"', "did you mean 'flashinfer'?"),
        ('chips = ["cpu:arm"]', 'chips = ["cpu:armv9"]', "did you mean 'cpu:arm'?"),
        ('backends = ["aiter", "triton", "torch_native"]', 'backends = ["fa3"]', "expects what can't be"),
        ('name = "schema"', 'name = "suite"', "lanes of one name"),
        ("\nhosted = true", "\nhostd = true", "did you mean 'hosted'?"),
    ],
)
def test_lanes_that_cannot_be(
    old: str, new: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "ci/lanes.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/lanes.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    assert main(["matrix", "--root", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
