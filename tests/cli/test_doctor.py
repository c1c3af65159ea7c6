"""`anyattn doctor`, on this machine, on simulated ones, and where torch is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anyattn.cli.diagnosis import BackendStatus, Diagnosis, LibraryStatus
from anyattn.cli.doctor import diagnose, render
from anyattn.cli.main import main
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.detect import simulate

ROOT = Path(__file__).parents[2]
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path) -> Doctor:
    """Runs doctor here with --json."""
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(cache))

    def run(*argv: str) -> dict[str, Any]:
        assert main(["doctor", "--json", *argv]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def in_child(cache: Path, *argv: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "anyattn.cli.main", "doctor", *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "ANYATTN_CACHE_DIR": str(cache), **environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(found: dict[str, Any], backend: str) -> dict[str, Any]:
    return next(entry for entry in found["backends"] if entry["backend"] == backend)


def library(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in found["libraries"] if entry["distribution"] == name)


def test_this_machine(doctor: Doctor) -> None:
    found = doctor("--device", "cpu")
    assert found["schema"] == 1
    assert found["machine"]["platform"] == "cpu"
    assert found["torch"]["state"] == "usable"
    assert found["problems"] == []
    assert status(found, "torch_native")["status"] == "ready"
    assert status(found, "torch_native")["phases"] == ["prefill", "decode", "verify", "draft"]
    assert found["next_steps"]
    assert set(found) == {
        *(
            "schema",
            "machine",
            "torch",
            "libraries",
            "backends",
            "probed",
            "problems",
            "next_steps",
            "notes",
            "plugins",
            "measured",
        )
    }


def test_the_text_says_the_same(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor("--device", "cpu")
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert found["machine"]["device_name"] in text
    for title in ("Machine", "Libraries", "Backends", "Next step"):
        assert f"\n{title}" in f"\n{text}"
    assert " ready     torch_native" in text
    assert all(entry["backend"] in text for entry in found["backends"])


def test_probing(doctor: Doctor) -> None:
    before, after = doctor("--device", "cpu"), doctor("--device", "cpu", "--probe")
    assert (before["probed"], after["probed"]) == (False, True)
    states = {entry["distribution"]: entry["state"] for entry in after["libraries"]}
    assert "installed" not in states.values(), "each was imported: it works or it doesn't"
    assert states["torch"] == "usable"


def test_a_simulated_machine(doctor: Doctor) -> None:
    found = doctor("--assume", "cuda:sm90-triton+tokenspeed-flashmla")
    assert found["machine"]["simulated"] is True
    assert library(found, "triton")["state"] == "missing"
    assert library(found, "triton")["remedy"] == "pip install 'triton>=3.6,<3.10'"
    assert library(found, "sgl-flash-mla")["state"] == "shadowed"
    triton = status(found, "triton")
    assert (triton["status"], triton["phases"]) == ("lacking", [])
    assert triton["reasons"][0]["code"] == "library_missing"
    assert triton["remedy"] == "pip install 'triton>=3.6,<3.10'"
    assert status(found, "flashinfer")["status"] == "ready"
    assert status(found, "ascend")["status"] == "other_hardware"


def test_other_builds_are_listed_only_where_installed(doctor: Doctor) -> None:
    names = {entry["distribution"] for entry in doctor("--assume", "cuda:sm90")["libraries"]}
    assert "sgl-kernel" not in names
    names = {entry["distribution"] for entry in doctor("--assume", "cuda:sm90+sgl-kernel")["libraries"]}
    assert "sgl-kernel" in names


def test_an_old_version_gets_a_pip_line(doctor: Doctor) -> None:
    triton = status(doctor("--assume", "rocm:gfx1100+triton==3.2.0"), "triton")
    assert triton["reasons"][0]["code"] == "library_version"
    assert triton["remedy"] == "pip install 'triton>=3.6,<3.10'"


def test_rdna_is_not_offered_aiter(doctor: Doctor) -> None:
    assert status(doctor("--assume", "rocm:gfx1100"), "aiter")["status"] == "other_hardware"


def test_no_torch(doctor: Doctor) -> None:
    found = doctor("--assume", "cuda:sm90-torch")
    assert found["torch"]["state"] == "missing"
    assert found["problems"] == ["torch isn't installed"]
    assert found["next_steps"] == ["make torch importable: pip install torch"]
    assert status(found, "flashinfer")["missing"] == "torch is missing"
    assert "ready" not in {entry["status"] for entry in found["backends"]}


def test_where_import_torch_raises(tmp_path: Path) -> None:
    """A folder on PYTHONPATH, so that any import of torch in this process would end it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('Failed to load the backend extension')")
    found = json.loads(in_child(tmp_path / "cache", "--json", PYTHONPATH=str(tmp_path)))
    assert found["torch"]["state"] == "broken"
    assert "RuntimeError: Failed to load the backend extension" in found["torch"]["reason"]
    assert found["machine"]["arch"]
    assert "doesn't import" in found["problems"][0]
    assert found["next_steps"][0].startswith("make torch importable")
    assert len(found["backends"]) > 10
    assert "ready" not in {entry["status"] for entry in found["backends"]}
    text = in_child(tmp_path / "cache", PYTHONPATH=str(tmp_path))
    assert "Problems" in text


def test_where_import_torch_kills(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = json.loads(in_child(tmp_path / "cache", "--json", PYTHONPATH=str(tmp_path)))
    assert "killed by SIGSEGV" in found["torch"]["reason"]


def test_a_misspelt_variable_is_a_problem_not_an_end(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_BACKND", "triton")
    assert any("did you mean 'ANYATTN_BACKEND'" in text for text in doctor("--device", "cpu")["problems"])


def test_an_assumed_host_is_pointed_out(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_ASSUME", "cuda:sm90")
    found = doctor("--device", "cpu")
    assert found["machine"]["platform"] == "cpu"
    assert any("ANYATTN_ASSUME=cuda:sm90" in text for text in found["problems"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--assume", "cuda:sm95"], "did you mean 'cuda:sm90'"),
        (["--device", "cuda:99"], "asked: cuda:99"),
        (["--assume", "cuda:sm90", "--probe"], "allowed: --assume alone"),
        (["--prob"], "did you mean '--probe'"),
        (["--timeout", "-1"], "seconds"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["doctor", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_catalog_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr("anyattn.cli.doctor.plugins", fail)
    diagnosis = diagnose(simulate("cpu:amx"))
    assert diagnosis.backends == ()
    assert diagnosis.notes == ("backends can't be listed: RuntimeError: odd",)
    assert diagnosis.problems == ("what is built in can't be read: RuntimeError: odd",)
    assert "backends can't be listed" in render(diagnosis)


HOST = HostFacts(
    platform="cuda",
    arch="sm90",
    device_name="NVIDIA H200",
    device_count=8,
    memory_bytes=141 << 30,
    num_units=132,
    driver="580.95.05",
    runtime="13.0",
    python="3.12.1",
    torch="2.14.1",
    torch_build="cuda 13.0",
    libraries={"fla-core": LibraryFacts("fla-core", "0.6.0", ("fla",), LibraryState.BROKEN, "it exits")},
    notes=("NVIDIA H200 is here, but torch 2.14.1 can't drive it: install a CUDA build",),
)


def test_the_page() -> None:
    torch = LibraryStatus("torch", "usable", "2.14.1", "tensors")
    page = render(
        Diagnosis(
            host=HOST,
            torch=torch,
            libraries=(
                torch,
                LibraryStatus("fla-core", "broken", "0.6.0", "GDN", (), "it exits", "pip install it"),
            ),
            backends=(
                BackendStatus("triton", "ready", "", ("decode",)),
                BackendStatus("fa3", "lacking", "", (), "library missing", "pip install tokenspeed-fa3"),
                BackendStatus("aiter", "other_hardware", ""),
            ),
            probed=True,
            problems=("a problem",),
            next_steps=("do this",),
        ),
        width=100,
    )
    assert page.splitlines() == [
        "Machine: 8 × NVIDIA H200 (cuda:sm90), 132 SMs, 141 GiB, driver 580.95.05, CUDA 13.0",
        "  Python 3.12.1, torch 2.14.1 (built for cuda 13.0)",
        "",
        "Problems",
        "  a problem",
        "",
        "Libraries",
        "  usable    torch 2.14.1                           tensors",
        "  broken    fla-core 0.6.0                         GDN",
        "            it exits",
        "            -> pip install it",
        "",
        "Backends",
        "  ready     triton           decode",
        "  lacking   fa3              library missing",
        "            -> pip install tokenspeed-fa3",
        "  for other hardware: aiter",
        "",
        "Notes",
        "  NVIDIA H200 is here, but torch 2.14.1 can't drive it: install a CUDA build",
        "",
        "Next step",
        "  do this",
    ]


def test_next_steps_begin_with_what_is_broken() -> None:
    diagnosis = diagnose(
        HostFacts(
            platform="cuda",
            arch="sm90",
            torch="2.14.1",
            simulated=True,
            notes=HOST.notes,
            libraries={**HOST.libraries, "torch": LibraryFacts("torch", "2.14.1", ("torch",))},
        )
    )
    assert diagnosis.next_steps[0] == HOST.notes[0]
    assert diagnosis.next_steps[1] == "fla-core is broken: pip install fla-core==0.6.0"
    assert diagnosis.next_steps[2].startswith("for ")
    assert "pip install" in diagnosis.next_steps[2]
