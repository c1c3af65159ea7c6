"""What is checked in is what the data says; what got worse has a reason."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest

from anyattn.catalog import records
from anyattn.cli import matrix
from anyattn.cli.matrix_results import load_results
from anyattn.cli.matrix_support import STATUSES, read_csv
from anyattn.cli.matrix_workflows import FORMATS
from anyattn.core.capabilities import Proof

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wanted() -> dict[Path, str]:
    return matrix.generated(ROOT)


def test_nothing_was_lost_without_a_reason(wanted: dict[Path, str]) -> None:
    lost = [f"{what}: {before} -> {after}" for what, before, after in matrix.losses(ROOT, wanted)]
    assert not lost, "\n".join([*lost, "if that is meant: anyattn matrix update --reason '…'"])


def test_workflow_tables_and_pages_are_current(wanted: dict[Path, str]) -> None:
    old = [str(path) for path in matrix.stale(ROOT, wanted)]
    assert not old, f"{', '.join(old)}: run `make docs`"


def test_every_change_on_file_has_a_reason() -> None:
    path = ROOT / matrix.CHANGES
    rows = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    assert all(row["reason"].strip() and row["before"] != row["after"] for row in rows)


def test_only_what_ran_on_a_chip_is_called_passing() -> None:
    cells = read_csv((ROOT / matrix.SUPPORT).read_text(encoding="utf-8"))
    assert {cell.status for cell in cells} <= set(STATUSES)
    native = {
        (result.backend, result.models, *chip.split(":"))
        for result in load_results(ROOT / matrix.RESULTS)
        for chip, (_, failed) in result.cells.items()
        if result.how == "native" and not failed
    }
    assert {cell.key for cell in cells if cell.status == "passing"} <= native
    assert all(cell.date and cell.commit and cell.versions for cell in cells if cell.status != "untested")
    assert ("triton", "dense", "cuda", "sm90") in {c.key for c in cells if c.status == "passing"}


def test_what_the_catalog_calls_proven_on_a_chip_has_a_result() -> None:
    cells = {cell.key: cell for cell in read_csv((ROOT / matrix.SUPPORT).read_text(encoding="utf-8"))}
    wanting = [
        f"{record.name} {kind.value} {chip}"
        for record in records()
        for row in record.rows
        for kind in row.kinds
        for chip in row.architectures
        if row.proof is Proof.HARDWARE
        and kind in record.targets
        and cells[record.name, kind.value, *chip.split(":")].status not in ("passing", "failing")
    ]
    assert not wanting, f"record their results (anyattn matrix record): {sorted(set(wanting))}"


def test_what_ran_on_a_chip_is_called_so_in_the_catalog() -> None:
    """Passing or failing: what a row says is that it was run there, and results say how that ended."""
    known = {record.name: record for record in records()}
    cells = read_csv((ROOT / matrix.SUPPORT).read_text(encoding="utf-8"))
    assert any(cell.status == "passing" and cell.key[2] == "cuda" for cell in cells)
    wanting = [
        cell.key
        for cell in cells
        if "ran on it" in cell.evidence and cell.key[2] == "cuda"
        if not any(
            row.proof is Proof.HARDWARE
            for row in known[cell.key[0]].rows
            if f"cuda:{cell.key[3]}" in row.architectures and cell.key[1] in {k.value for k in row.kinds}
        )
    ]
    assert not wanting, "anyattn/catalog still calls them untested"


def test_results_name_commits_of_this_repository() -> None:
    commits = {result.commit for result in load_results(ROOT / matrix.RESULTS)}
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True)
    if shallow.stdout.strip() != b"false":
        pytest.skip("a shallow checkout has no history")
    for commit in sorted(commits):
        done = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, f"no commit {commit} here"


@pytest.mark.parametrize("name", FORMATS)
def test_pipelines_are_yaml_with_every_lane(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    lanes = matrix.lanes_of(ROOT)
    data = yaml.safe_load(FORMATS[name](lanes))
    jobs = {
        "github": lambda: set(data["jobs"]),
        "gitlab": lambda: set(data) - {"stages"},
        "buildkite": lambda: {step["key"] for step in data["steps"]},
    }[name]()
    assert jobs == {lane.name for lane in lanes}


def test_a_job_runs_every_backend_and_then_fails(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    data = yaml.safe_load((ROOT / matrix.WORKFLOW).read_text(encoding="utf-8"))
    job = data["jobs"]["cuda-sm90"]
    assert job["runs-on"] == ["self-hosted", "nvidia-sm90"]
    assert "contains(fromJSON(vars.ANYATTN_LANES" in job["if"]
    script = next(step["run"] for step in job["steps"] if step.get("name") == "run")
    verified = re.findall(r"verify (\w+) --full --json > \S+ \|\| status=1", script)
    assert verified == ["triton", "flashinfer", "fa3", "flex_attention", "torch_native"]
    assert script.strip().endswith("exit $status")
    assert "if" not in data["jobs"]["cpu-x86"]


def test_hardware_free_lanes_run_on_machines_that_everybody_has() -> None:
    lanes = {lane.name: lane for lane in matrix.lanes_of(ROOT)}
    free = ("suite", "schema", "simulate", "emulate", "cross-compile", "vendor-package")
    assert all(lanes[name].hosted for name in free)
    assert {"cuda", "rocm", "ascend", "cpu"} == {c.partition(":")[0] for x in lanes.values() for c in x.chips}


def test_results_are_small() -> None:
    for path in (ROOT / matrix.RESULTS).glob("*.json"):
        assert path.stat().st_size < 4000, path.name
        assert json.loads(path.read_text(encoding="utf-8"))["cells"]
