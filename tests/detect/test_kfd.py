"""ROCm facts from a fake sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from detect_fakes import add_gpu, sources, write

from anyattn.detect.found import Found
from anyattn.detect.kfd import NODES, gfx_name, read_rocm


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120000, "gfx1200"),
        (120001, "gfx1201"),
        (90012, "gfx90c"),
    ],
)
def test_gfx_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def add_cpu(root: Path, node: int) -> None:
    write(root, {f"{NODES}/{node}/properties": "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n"})


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets and three GPUs; node 10 sorts after node 9."""
    add_cpu(tmp_path, 0)
    add_cpu(tmp_path, 1)
    add_gpu(tmp_path, 2, minor=128, device_id=0x74A1)
    add_gpu(tmp_path, 9, minor=129, device_id=0x74A5)
    add_gpu(tmp_path, 10, minor=130, device_id=0x9999)
    write(tmp_path, {"/opt/rocm/.info/version": "7.0.2-56\n", "/sys/module/amdgpu/version": "6.14.14\n"})
    return tmp_path


def names(found: Found) -> list[str]:
    return [device.name.removeprefix("AMD ") for device in found.devices]


def test_three_gpus(machine: Path) -> None:
    found = read_rocm(sources(machine))
    assert names(found) == ["Instinct MI300X", "Instinct MI325X", "GPU (gfx942)"]
    device = found.devices[0]
    assert (device.arch, device.num_units, device.memory_bytes) == ("gfx942", 304, 206141652992)
    assert (found.runtime, found.driver, found.present, found.notes) == ("7.0.2", "6.14.14", 3, ())


def test_the_driver_s_product_name_counts_first(machine: Path) -> None:
    write(machine, {"/sys/class/drm/renderD128/device/product_name": "AMD Instinct MI300X VF\n"})
    assert names(read_rocm(sources(machine)))[0] == "Instinct MI300X VF"


@pytest.mark.parametrize(
    ("environ", "expected", "filtered"),
    [
        ({}, [0, 1, 2], ()),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0], ("HIP_VISIBLE_DEVICES",)),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [1], ("CUDA_VISIBLE_DEVICES",)),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [0], ("HIP_VISIBLE_DEVICES",)),
        (
            {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"},
            [2],
            ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        ),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ab09"}, [1], ("ROCR_VISIBLE_DEVICES",)),
        ({"ROCR_VISIBLE_DEVICES": "0,GPU-000000000000AB0A"}, [0, 2], ("ROCR_VISIBLE_DEVICES",)),
        ({"ROCR_VISIBLE_DEVICES": ""}, [], ("ROCR_VISIBLE_DEVICES",)),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], ("HIP_VISIBLE_DEVICES",)),
    ],
)
def test_visibility(
    machine: Path, environ: dict[str, str], expected: list[int], filtered: tuple[str, ...]
) -> None:
    found = read_rocm(sources(machine, environ))
    everything = ["Instinct MI300X", "Instinct MI325X", "GPU (gfx942)"]
    assert names(found) == [everything[i] for i in expected]
    assert found.filtered_by == filtered
    assert found.present == 3


def test_a_gpu_without_a_device_node_is_left_out(machine: Path) -> None:
    (machine / "dev/dri/renderD129").unlink()
    found = read_rocm(sources(machine))
    assert names(found) == ["Instinct MI300X", "GPU (gfx942)"]
    assert "renderD129" in found.notes[0]


def test_an_unreadable_node_is_a_note(machine: Path) -> None:
    properties = machine / NODES.lstrip("/") / "9/properties"
    properties.unlink()
    properties.mkdir()  # reading a folder fails for root too
    found = read_rocm(sources(machine))
    assert names(found) == ["Instinct MI300X", "GPU (gfx942)"]
    assert "GPU node 9" in found.notes[0]


def test_a_machine_without_amdkfd(tmp_path: Path) -> None:
    write(tmp_path, {"/opt/rocm/.info/version": "7.0.2-56\n"})
    assert read_rocm(sources(tmp_path)) == Found("rocm")


def test_rocm_path_and_missing_runtime(machine: Path) -> None:
    write(machine, {"/home/me/rocm/.info/version": "6.4.1-83"})
    assert read_rocm(sources(machine, {"ROCM_PATH": "/home/me/rocm"})).runtime == "6.4.1"
    assert read_rocm(sources(machine, {"ROCM_PATH": "/nowhere"})).runtime is None
