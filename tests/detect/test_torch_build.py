"""torch's version and build, read as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from detect_fakes import install, sources, version_py

from anyattn.detect.torch_build import TorchBuild, read_torch


def read(*path: Path) -> TorchBuild:
    return read_torch(sources(Path("/nowhere"), path=tuple(map(str, path))))


@pytest.mark.parametrize(
    ("fields", "build"),
    [
        ({"cuda": "13.0"}, "cuda 13.0"),
        ({"hip": "7.0.51831-a3e329ad8"}, "rocm 7.0"),
        ({"xpu": "20250201"}, "xpu 20250201"),
        ({}, "cpu"),
    ],
)
def test_builds(tmp_path: Path, fields: dict[str, str], build: str) -> None:
    files = {"torch/__init__.py": "raise RuntimeError", "torch/version.py": version_py(**fields)}
    install(tmp_path, "torch", "2.13.0", files)
    assert read(tmp_path) == TorchBuild("2.13.0", build)


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("2.13.0+cu130", "cuda 13.0"),
        ("2.13.0+cu128", "cuda 12.8"),
        ("2.13.0+rocm7.0", "rocm 7.0"),
        ("2.13.0+cpu", "cpu"),
        ("2.13.0+xpu", "xpu"),
        ("2.13.0", None),
    ],
)
def test_the_local_version_tells_when_version_py_cannot(
    tmp_path: Path, version: str, build: str | None
) -> None:
    install(tmp_path, "torch", version, {"torch/__init__.py": ""})
    assert read(tmp_path) == TorchBuild(version, build)


def test_no_torch(tmp_path: Path) -> None:
    assert read(tmp_path) == TorchBuild(note="torch isn't installed")


def test_a_module_without_a_distribution(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError")
    (tmp_path / "torch/version.py").write_text(version_py(cuda="12.8"))
    found = read(tmp_path)
    assert (found.version, found.build, found.stray) == ("2.13.0", "cuda 12.8", True)
    assert "without a distribution" in (found.note or "")
