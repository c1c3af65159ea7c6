"""Stand-ins have the signatures of the real libraries, as recorded from their sources."""

from __future__ import annotations

import inspect
from importlib import metadata
from pathlib import Path

import pytest

from anyattn.testing.emulators import emulating
from anyattn.testing.signatures import (
    Recorded,
    SignatureError,
    Source,
    differences,
    main,
    signature_of,
    signature_text,
)

FILES = sorted((Path(__file__).parent / "signatures").glob("*.json"))
ALIASES = {"begin_forward", "run_return_lse"}
"""Bound to another function in the library's class body, so that its source has no definition of them."""


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_stand_ins_take_what_the_library_takes(file: Path) -> None:
    recorded = Recorded.load(file)
    assert recorded.signatures
    for name in recorded.emulators:
        with emulating(name) as emulator:
            modules = emulator.modules()
        ours = {target: signature_of(modules, target) for target in recorded.signatures}
        live = Recorded(recorded.distribution, recorded.version, recorded.emulators, ours)
        assert differences(recorded, live) == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_what_is_installed_is_what_was_recorded(file: Path) -> None:
    recorded = Recorded.load(file)
    try:
        source = Source.installed(recorded.distribution)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{recorded.distribution} isn't installed")
    if source.version != recorded.version:
        pytest.skip(f"{source.version} is installed, {recorded.version} was recorded")
    assert differences(recorded, recorded.read_from(source)) == []


def test_every_function_of_flashinfers_stand_in_is_recorded() -> None:
    recorded = Recorded.load(Path(__file__).parent / "signatures" / "flashinfer-python.json").signatures
    with emulating("flashinfer") as emulator:
        modules = emulator.modules()
    names = []
    for module, found in modules.items():
        for name, value in vars(found).items():
            if inspect.isfunction(value):
                names.append(f"{module}:{name}")
            elif inspect.isclass(value) and module != "flashinfer":
                methods = [m for m, f in vars(value).items() if inspect.isfunction(f) and m not in ALIASES]
                names += [f"{module}:{name}.{m}" for m in methods if not m.startswith("_")]
    assert len(names) >= 30
    assert sorted(set(names) - set(recorded)) == []


_LIBRARY = {
    "lib/__init__.py": "from .deep import work as work\nfrom ._star import *\n",
    "lib/deep.py": "LIMIT = 7\ndef work(a, b: int = 1e-3, *, limit=LIMIT, **more): ...\n",
    "lib/_star.py": "class Box:\n"
    "    def __init__(self, size=(None, None)): ...\n"
    "    @overload\n    def run(self, x): ...\n"
    "    def run(self, x, *args, kind='NHD'): ...\n",
    "lib-1.5.dist-info/METADATA": "Name: lib\nVersion: 1.5\n",
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in _LIBRARY.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_sources_are_read_without_importing(library: Path) -> None:
    source = Source.of(library)
    assert (source.distribution, source.version) == ("lib", "1.5")
    assert source.signature("lib:work") == "(a, b=0.001, *, limit=7, **more)"
    assert source.signature("lib:Box") == "(size=(None, None))"
    assert source.signature("lib:Box.run") == "(x, *args, kind='NHD')"
    for wrong in ("lib:gone", "lib:Box.gone", "elsewhere:work"):
        with pytest.raises(SignatureError, match=wrong.partition(":")[2].partition(".")[0]):
            source.signature(wrong)


def test_live_functions_read_the_same() -> None:
    def work(a: int, b: float = 1e-3, *args: int, kind: str = "NHD", **more: int) -> None: ...

    assert signature_text(work) == "(a, b=0.001, *args, kind='NHD', **more)"


def test_a_changed_library_is_reported_and_recorded(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lib.json"
    Recorded("lib", "1.4", ("flashinfer",), {"lib:work": "(a)", "lib:gone": "()"}).save(file)
    assert main([str(file), "--from", str(library)]) == 1
    assert "2 of 2 differ" in capsys.readouterr().out
    assert main([str(file), "--from", str(library), "--add", "lib:Box", "--write"]) == 0
    now = Recorded.load(file)
    assert now.version == "1.5"
    assert now.signatures["lib:gone"] == "not there"
    assert now.signatures["lib:Box"] == "(size=(None, None))"
