"""CUDA facts from a fake NVML."""

from __future__ import annotations

from pathlib import Path

import pytest
from detect_fakes import NOT_SUPPORTED, FakeGpu, FakeMig, FakeNvml, sources

from anyattn.detect.found import Found
from anyattn.detect.nvml import read_cuda


def read(tmp_path: Path, nvml: FakeNvml, **environ: str) -> Found:
    return read_cuda(sources(tmp_path, environ, nvml=nvml))


def test_one_gpu(tmp_path: Path) -> None:
    nvml = FakeNvml(FakeGpu("GPU-1"))
    found = read(tmp_path, nvml)
    (device,) = found.devices
    assert (device.arch, device.name, device.num_units) == ("sm90", "NVIDIA H200", 132)
    assert device.memory_bytes == 150_754_820_096
    assert device.features == frozenset()
    assert (found.driver, found.runtime, found.present, found.notes) == ("580.95.05", "13.1", 1, ())
    assert nvml.calls[0] == "nvmlInit_v2"
    assert nvml.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("capability", "cores", "arch", "units"),
    [
        ((8, 0), 108 * 64, "sm80", 108),
        ((8, 6), 72 * 128, "sm86", 72),
        ((8, 9), 142 * 128, "sm89", 142),
        ((10, 0), 148 * 128, "sm100", 148),
        ((10, 3), 148 * 128, "sm103", 148),
        ((11, 0), 20 * 128, "sm110", 20),
        ((12, 0), 170 * 128, "sm120", 170),
        ((12, 1), 48 * 128, "sm121", 48),
        ((7, 5), 40 * 64, "sm75", None),
    ],
)
def test_architectures_are_exact(
    tmp_path: Path, capability: tuple[int, int], cores: int, arch: str, units: int | None
) -> None:
    found = read(tmp_path, FakeNvml(FakeGpu("GPU-1", capability=capability, cores=cores)))
    assert (found.devices[0].arch, found.devices[0].num_units) == (arch, units)


@pytest.mark.parametrize(
    ("visible", "names", "filtered"),
    [
        (None, ["A", "B", "C"], False),
        ("1", ["B"], True),
        ("2,0", ["C", "A"], True),
        ("2,1,0", ["C", "B", "A"], False),
        ("", [], True),
        ("-1", [], True),
        ("GPU-b", ["B"], True),
        ("GPU-c,9,GPU-b", ["C"], True),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str | None, names: list[str], filtered: bool) -> None:
    nvml = FakeNvml(*(FakeGpu(f"GPU-{n.lower()}0", name=n) for n in "ABC"))
    found = read(tmp_path, nvml, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert [device.name for device in found.devices] == names
    assert found.present == 3
    assert found.filtered_by == (("CUDA_VISIBLE_DEVICES",) if filtered else ())


def test_identical_gpus_are_still_two(tmp_path: Path) -> None:
    nvml = FakeNvml(FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    assert len(read(tmp_path, nvml).devices) == 2
    assert len(read(tmp_path, nvml, CUDA_VISIBLE_DEVICES="1,0").devices) == 2


def mig_machine() -> FakeNvml:
    instances = [None, FakeMig("MIG-1111", "first"), FakeMig("MIG-2222", "second", sms=32, gpu_instance=3)]
    return FakeNvml(
        FakeGpu("GPU-whole", name="whole"),
        FakeGpu("GPU-cut", name="cut", mig=True, instances=instances),
    )


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "first"),  # no whole GPU beside a MIG instance
        ("0", "whole"),
        ("1", "first"),
        ("GPU-cut", "first"),
        ("MIG-2222", "second"),
        ("MIG-GPU-cut/3/0", "second"),
        ("MIG-1111,MIG-2222", "first"),
        ("0,MIG-2222", "second"),
    ],
)
def test_mig(tmp_path: Path, visible: str | None, name: str) -> None:
    found = read(tmp_path, mig_machine(), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert [device.name for device in found.devices] == [name]
    assert ("mig" in found.devices[0].features) == (name != "whole")


def test_a_mig_instance_has_its_own_size(tmp_path: Path) -> None:
    (device,) = read(tmp_path, mig_machine(), CUDA_VISIBLE_DEVICES="MIG-2222").devices
    assert (device.arch, device.num_units, device.memory_bytes) == ("sm90", 32, 16384 << 20)


def test_mig_mode_without_instances_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, FakeNvml(FakeGpu("GPU-1", mig=True)))
    assert found.devices == ()
    assert "has no instance" in found.notes[0]


def test_several_instances_say_that_one_is_taken(tmp_path: Path) -> None:
    found = read(tmp_path, mig_machine(), CUDA_VISIBLE_DEVICES="MIG-1111,MIG-2222")
    assert "one MIG instance" in found.notes[0]


def test_different_gpus_ask_for_a_fixed_order(tmp_path: Path) -> None:
    nvml = FakeNvml(FakeGpu("GPU-1"), FakeGpu("GPU-2", capability=(8, 0)))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in read(tmp_path, nvml).notes[0]
    assert read(tmp_path, nvml, CUDA_DEVICE_ORDER="PCI_BUS_ID").notes == ()


def test_no_driver_is_no_note(tmp_path: Path) -> None:
    assert read_cuda(sources(tmp_path)) == Found("cuda")


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_does_not_answer_is_a_note(tmp_path: Path, function: str) -> None:
    for nvml in (FakeNvml(FakeGpu("GPU-1"), failing={function: 9}), FakeNvml(missing=(function,))):
        found = read(tmp_path, nvml)
        assert found.devices == ()
        assert function in found.notes[0]


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMemoryInfo",
        "nvmlSystemGetDriverVersion",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlShutdown",
    ],
)
def test_an_old_driver_lacks_what_it_lacks(tmp_path: Path, function: str) -> None:
    for nvml in (
        FakeNvml(FakeGpu("GPU-1"), missing=(function,)),
        FakeNvml(FakeGpu("GPU-1"), failing={function: NOT_SUPPORTED}),
    ):
        found = read(tmp_path, nvml)
        assert [device.arch for device in found.devices] == ["sm90"]


def test_a_gpu_that_fell_off_the_bus_is_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, FakeNvml(FakeGpu("GPU-1"), failing={"nvmlDeviceGetUUID": 15}))
    assert found.devices == ()
    assert found.notes == ("GPU 0 left out: nvmlDeviceGetUUID returned status 15",)
