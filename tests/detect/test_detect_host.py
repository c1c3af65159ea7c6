"""`detect_host` on fake machines, and on this one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from detect_fakes import FakeGpu, FakeNvml, add_gpu, install, no_driver, sources, version_py, write

from anyattn.core.facts import HostFacts, LibraryState
from anyattn.detect import Library, Sources, detect_host
from anyattn.errors import ConfigError, UnknownNameError

BUILDS = {"cuda": {"cuda": "13.0"}, "rocm": {"hip": "7.0.1"}, "cpu": {}}


class Machine:
    """A fake machine: parts are added, then it is detected."""

    def __init__(self, root: Path) -> None:
        self.root, self.nvml, self.environ = root, no_driver, {}
        self.site = root / "site"
        self.site.mkdir()
        write(
            root,
            {"/proc/cpuinfo": "model name: Xeon\nflags: avx2 fma\n", "/proc/meminfo": "MemTotal: 8 kB\n"},
        )

    def torch(self, build: str) -> Machine:
        files = {"torch/__init__.py": "", "torch/version.py": version_py(**BUILDS[build])}
        install(self.site, "torch", "2.13.0", files)
        return self

    def cuda(self, *gpus: FakeGpu) -> Machine:
        self.nvml = FakeNvml(*gpus or (FakeGpu("GPU-1"),))
        return self

    def rocm(self, count: int = 1) -> Machine:
        for number in range(count):
            add_gpu(self.root, number + 1, minor=128 + number)
        return self

    def ascend(self) -> Machine:
        write(self.root, {"/dev/davinci0": "", "/sys/bus/pci/devices/a/vendor": "0x19e5"})
        write(self.root, {"/sys/bus/pci/devices/a/device": "0xd802"})
        return self

    def npu_library(self) -> Machine:
        install(self.site, "torch-npu", "2.13.0", {"torch_npu/__init__.py": ""})
        return self

    def env(self, **environ: str) -> Machine:
        self.environ = environ
        return self

    @property
    def sources(self) -> Sources:
        return sources(self.root, self.environ, nvml=self.nvml, path=(str(self.site),))

    def detect(self, device: str | None = None) -> HostFacts:
        return detect_host(device, sources=self.sources)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_cuda_machine(machine: Machine) -> None:
    facts = machine.torch("cuda").cuda(FakeGpu("GPU-1"), FakeGpu("GPU-2")).detect()
    assert (facts.target, facts.device_name, facts.device_count) == ("cuda:sm90", "NVIDIA H200", 2)
    assert (facts.num_units, facts.driver, facts.runtime) == (132, "580.95.05", "13.1")
    assert (facts.torch, facts.torch_build, facts.simulated) == ("2.13.0", "cuda 13.0", False)
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.library("torch").state is LibraryState.UNKNOWN
    assert facts.notes == ()


def test_torch_decides_between_two_vendors(machine: Machine) -> None:
    facts = machine.torch("rocm").cuda().rocm().detect()
    assert facts.target == "rocm:gfx942"
    assert "NVIDIA H200 is here, but torch 2.13.0 can't drive it" in facts.notes[0]


def test_without_torch_the_first_accelerator_counts(machine: Machine) -> None:
    facts = machine.rocm().ascend().detect()
    assert facts.target == "rocm:gfx942"
    assert (facts.torch, facts.torch_build) == (None, None)
    assert "torch isn't installed" in facts.notes


@pytest.mark.parametrize(("device", "platform"), [("cuda", "rocm"), ("cuda:0", "rocm"), ("cpu", "cpu")])
def test_torch_calls_rocm_cuda(machine: Machine, device: str, platform: str) -> None:
    assert machine.torch("rocm").rocm().detect(device).platform == platform


def test_rocm_s_runtime_may_come_with_torch(machine: Machine) -> None:
    assert machine.torch("rocm").rocm().detect().runtime == "7.0"


def test_a_cpu_torch_takes_the_cpu_and_says_why(machine: Machine) -> None:
    facts = machine.torch("cpu").cuda().detect()
    assert (facts.target, facts.device_name, facts.num_units) == ("cpu:avx2", "Xeon", 8)
    assert "NVIDIA H200 is here, but torch 2.13.0 can't drive it: install a CUDA build" in facts.notes[0]


def test_a_cuda_torch_without_a_gpu(machine: Machine) -> None:
    facts = machine.torch("cuda").detect()
    assert facts.target == "cpu:avx2"
    assert facts.notes == ("torch is built for cuda 13.0, but there is no cuda device",)


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_leave_the_cpu(machine: Machine, value: str) -> None:
    facts = machine.torch("cuda").cuda().env(CUDA_VISIBLE_DEVICES=value).detect()
    assert facts.target == "cpu:avx2"
    assert "cuda devices here: 1, visible: none (CUDA_VISIBLE_DEVICES hides some)" in facts.notes


def test_ascend_needs_its_torch(machine: Machine) -> None:
    facts = machine.torch("cpu").ascend().detect()
    assert facts.target == "cpu:avx2"
    assert any("pip install torch-npu" in note for note in facts.notes)
    assert machine.npu_library().detect().target == "ascend:910b"
    assert machine.detect("npu:0").target == "ascend:910b"


def test_a_device_is_picked_by_its_visible_number(machine: Machine) -> None:
    gpus = (FakeGpu("GPU-1", "old", (8, 0)), FakeGpu("GPU-2", "new", (10, 0)))
    facts = machine.torch("cuda").cuda(*gpus).detect("cuda:1")
    assert (facts.arch, facts.device_name, facts.device_count) == ("sm100", "new", 2)
    assert "devices differ: these facts are of number 1, others are sm80" in facts.notes
    assert machine.env(CUDA_VISIBLE_DEVICES="1,0").detect("cuda:1").device_name == "old"


def test_asking_for_the_cpu_asks_no_driver(machine: Machine) -> None:
    machine.torch("cuda").cuda()
    assert machine.detect("cpu").target == "cpu:avx2"
    assert machine.nvml.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:2", ("2 visible of 2", "cuda:0 … cuda:1", "cuda:2")),
        ("npu", ("can't drive", "cuda, cpu", "torch-npu")),
        ("cpu:1", ("isn't there", "cpu")),
        ("cuda:x", ("can't be read", "cuda:NUMBER")),
        ("cuda:-1", ("can't be read",)),
        ("cuda:", ("can't be read",)),
    ],
)
def test_a_device_that_is_not_there(machine: Machine, device: str, words: tuple[str, ...]) -> None:
    machine.torch("cuda").cuda(FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    with pytest.raises(ConfigError) as caught:
        machine.detect(device)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_device_that_is_hidden(machine: Machine) -> None:
    machine.torch("cuda").cuda().env(CUDA_VISIBLE_DEVICES="")
    with pytest.raises(ConfigError, match=r"0 visible of 1 \(CUDA_VISIBLE_DEVICES hides some\)"):
        machine.detect("cuda")


def test_a_device_that_this_torch_cannot_drive(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0 can't drive.*allowed: cpu.*CUDA build"):
        machine.torch("cpu").cuda().detect("cuda")


def test_an_unknown_type_of_device(machine: Machine) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        machine.detect("cuad:0")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_raises_whatever_is_broken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("odd")

    for platform in ("cuda", "rocm", "ascend", "cpu"):
        monkeypatch.setitem(__import__("anyattn.detect.host", fromlist=["x"]).READERS, platform, fail)
    monkeypatch.setattr("anyattn.detect.host.read_torch", fail)
    monkeypatch.setattr("anyattn.detect.libraries.find", fail)
    facts = machine.detect(device)
    assert facts.target == "cpu:generic"
    assert "cpu can't be looked up: RuntimeError: odd" in facts.notes
    assert any(note.startswith("torch can't be looked up") for note in facts.notes)


def test_a_driver_library_of_another_kind(machine: Machine) -> None:
    machine.nvml = lambda: object()
    facts = machine.torch("cuda").detect()
    assert facts.platform == "cpu"
    assert any("nvmlInit_v2 is not in this driver" in note for note in facts.notes)


def test_plugins_may_ask_for_their_libraries(machine: Machine) -> None:
    install(machine.site, "acme-attn", "1.2", {"acme/__init__.py": ""})
    acme = Library(
        distribution="acme-attn", modules=("acme",), platforms=("cuda",), recorded=None, provides="kernels"
    )
    facts = detect_host(sources=machine.torch("cpu").sources, extra=[acme])
    assert facts.library("acme-attn").version == "1.2"


def test_a_torch_without_metadata_is_a_library_too(machine: Machine) -> None:
    (machine.site / "torch").mkdir()
    (machine.site / "torch/__init__.py").write_text("")
    facts = machine.detect()
    assert facts.library("torch").modules == ("torch",)
    assert "without a distribution" in (facts.library("torch").reason or "")


def run(code: str, environ: Mapping[str, str]) -> str:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PATH": "/usr/bin:/bin", **environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_this_machine_in_half_a_second_without_torch() -> None:
    code = """
        import sys, time
        from anyattn.detect import detect_host
        start = time.perf_counter()
        facts = detect_host()
        print(time.perf_counter() - start, facts.arch != "", "torch" in sys.modules)
    """
    seconds, has_arch, has_torch = run(code, {}).split()
    assert float(seconds) < 0.5
    assert (has_arch, has_torch) == ("True", "False")


def test_where_import_torch_raises(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('Failed to load the backend extension')")
    code = """
        from anyattn.detect import detect_host
        facts = detect_host()
        torch = facts.library("torch")
        print(facts.target != "", torch.state.value, torch.reason)
    """
    found = run(code, {"PYTHONPATH": str(tmp_path)})
    assert found.startswith("True ")
    assert str(tmp_path) in found


def test_a_second_look_is_quick() -> None:
    detect_host()
    start = time.perf_counter()
    detect_host()
    assert time.perf_counter() - start < 0.2
