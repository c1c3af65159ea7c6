"""Detection of plugins' devices, and the small questions that `api` answers about platforms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_tools import install, points

from anyattn import api
from anyattn.core.facts import HostFacts
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.detect import Sources, detect_machine, discover, machine
from anyattn.detect.plugins import Plugins
from anyattn.errors import ConfigError, GraphError, UnknownNameError


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugins]:
    before = set(sys.modules)
    folder = install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    yield discover(points(folder), {})
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "anyattn_lumen":
            del sys.modules[name]


def chips(root: Path, *names: str) -> Sources:
    """A machine with these Lumen chips and nothing else."""
    for number, name in enumerate(names):
        folder = root / f"sys/class/lumen/lumen{number}"
        folder.mkdir(parents=True)
        (folder / "chip").write_text(name)
    return Sources(root=root, environ={}, nvml=_no_nvml)


def _no_nvml() -> None:
    raise OSError("no driver")


def test_a_plugins_device_is_taken_where_there_is_only_a_cpu(found: Plugins, tmp_path: Path) -> None:
    facts = detect_machine(sources=chips(tmp_path / "root", "L2", "L1"), found=found)
    assert (facts.target, facts.device_count, facts.runtime) == ("lumen:l2", 2, "1.0")
    assert facts.torch is not None


def test_by_name_and_number(found: Plugins, tmp_path: Path) -> None:
    sources = chips(tmp_path / "root", "l2", "l1")
    assert detect_machine("lumen:1", sources=sources, found=found).arch == "l1"
    assert detect_machine("cpu", sources=sources, found=found).platform == "cpu"
    with pytest.raises(ConfigError, match=r"2 visible of lumen.*lumen:0 … lumen:1"):
        detect_machine("lumen:2", sources=sources, found=found)


def test_beside_an_accelerator_it_is_a_note(
    found: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = HostFacts(platform="cuda", arch="sm90", device_name="NVIDIA H200")
    monkeypatch.setattr(machine, "detect_host", lambda *args, **options: gpu)
    facts = detect_machine(sources=chips(tmp_path / "root", "l1"), found=found)
    assert facts.target == "cuda:sm90"
    assert facts.notes == ("Lumen L1 is here too: device='lumen' takes it",)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('no bus')", "RuntimeError: no bus"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "returned NoneType, not Found"),
        ("return Found('lumen', (Device('l9', 'Lumen L9'),))", "found l9, which the record doesn't list"),
    ],
)
def test_a_reader_that_fails_is_a_note(body: str, told: str, found: Plugins, tmp_path: Path) -> None:
    path = tmp_path / "site/anyattn_lumen/detection.py"
    path.write_text(f"from anyattn.detect.found import Device, Found\n\ndef look(sources):\n    {body}\n")
    facts = detect_machine(sources=chips(tmp_path / "root"), found=found)
    assert facts.platform == "cpu"
    (note,) = [note for note in facts.notes if "lumen" in note]
    assert note.startswith("lumen of anyattn-lumen 0.1.0 can't be looked up: ")
    assert told in note


def test_questions_about_platforms() -> None:
    assert [api.device_type(name) for name in ("cuda", "rocm", "ascend", "cpu")] == [
        "cuda",
        "cuda",
        "npu",
        "cpu",
    ]
    assert api.plugin_host("cpu") is None
    assert isinstance(api.graph_platform("cpu", "cpu"), RecorderPlatform)
    with pytest.raises(GraphError):
        api.graph_platform("cpu", "meta")
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        api.device_type("cudo")
