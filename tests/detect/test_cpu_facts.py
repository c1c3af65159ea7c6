"""CPU facts from a fake /proc."""

from __future__ import annotations

from pathlib import Path

import pytest
from detect_fakes import sources, write

from anyattn.detect.cpu import cpu_arch, read_cpu

AVX2 = "fpu sse2 avx avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


def cpuinfo(flags: str, model: str = "AMD EPYC 9654") -> str:
    """Two processors; the second has no flags, to show that the first is read."""
    return f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t: none\n"


@pytest.mark.parametrize(
    ("machine", "flags", "arch"),
    [
        ("x86_64", f"{AVX512} amx_tile amx_bf16", "amx"),
        ("x86_64", f"{AVX512} amx_tile amx_int8", "amx"),
        ("x86_64", f"{AVX512} amx_tile", "avx512"),  # a tile without a multiply
        ("x86_64", f"{AVX512} amx_bf16", "avx512"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", f"{AVX2} avx512f", "avx2"),  # Knights Landing and its like
        ("x86_64", AVX2, "avx2"),
        ("x86_64", "avx2", "generic"),
        ("x86_64", "sse2", "generic"),
        ("aarch64", "asimd sve", "arm"),
        ("arm64", "", "arm"),
        ("riscv64", "", "generic"),
    ],
)
def test_architectures(machine: str, flags: str, arch: str) -> None:
    assert cpu_arch(machine, frozenset(flags.split())) == arch


def test_a_machine(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "/proc/cpuinfo": cpuinfo(f"{AVX512} avx512_bf16"),
            "/proc/meminfo": "MemTotal:  1024 kB\nMemFree: 1 kB\n",
        },
    )
    found = read_cpu(sources(tmp_path, cpus=96))
    (device,) = found.devices
    assert (device.arch, device.name, device.num_units) == ("avx512", "AMD EPYC 9654", 96)
    assert device.memory_bytes == 1024 * 1024
    assert "avx512_bf16" in device.features
    assert "sse2" not in device.features
    assert found.notes == ()


def test_a_container_s_limits(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "/proc/cpuinfo": cpuinfo(AVX2),
            "/proc/meminfo": "MemTotal: 8388608 kB\n",
            "/sys/fs/cgroup/memory.max": "1073741824\n",
            "/sys/fs/cgroup/cpu.max": "350000 100000\n",
        },
    )
    (device,) = read_cpu(sources(tmp_path, cpus=96)).devices
    assert (device.num_units, device.memory_bytes) == (4, 1 << 30)


def test_no_limits(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "/proc/cpuinfo": cpuinfo(AVX2),
            "/proc/meminfo": "MemTotal: 1024 kB\n",
            "/sys/fs/cgroup/memory.max": "max\n",
            "/sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    (device,) = read_cpu(sources(tmp_path, cpus=96)).devices
    assert (device.num_units, device.memory_bytes) == (96, 1 << 20)


def test_an_arm_server(tmp_path: Path) -> None:
    write(
        tmp_path, {"/proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd sve i8mm bf16\nCPU part\t: 0xd4f\n"}
    )
    (device,) = read_cpu(sources(tmp_path, machine="aarch64")).devices
    assert (device.arch, device.name) == ("arm", "aarch64")
    assert device.features == {"asimd", "sve", "i8mm", "bf16"}


def test_a_system_without_proc(tmp_path: Path) -> None:
    found = read_cpu(sources(tmp_path, machine="arm64", cpus=None))
    assert [(d.arch, d.num_units, d.memory_bytes) for d in found.devices] == [("arm", None, None)]
    assert "/proc/cpuinfo" in found.notes[0]
