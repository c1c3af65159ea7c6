"""CPU facts from `/proc/cpuinfo` (what the kernel lets a process use) and `/proc/meminfo`."""

from __future__ import annotations

from anyattn.detect.found import Device, Found
from anyattn.detect.sources import Sources

__all__ = ["cpu_arch", "read_cpu"]

X86 = ("x86_64", "amd64", "i686")
ARM = ("aarch64", "arm64")
LEVELS = (
    ("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")),
    ("avx2", ("avx2", "fma")),
)
"""Level -> flags that must all be there; as torch's dispatcher asks for them."""

FEATURES = frozenset(
    {
        *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx2", "avx_vnni", "fma", "f16c"),
        *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
        *("asimd", "asimddp", "asimdhp", "sve", "sve2", "bf16", "i8mm"),
    }
)
"""Flags worth keeping, in the kernel's spelling."""


def cpu_arch(machine: str, flags: frozenset[str]) -> str:
    """`amx`, `avx512`, `avx2`, `arm` or `generic`.

    A tile without a matrix multiply is of no use: amx needs `amx_tile` and `amx_bf16` or `amx_int8`.
    """
    if machine.lower() in ARM:
        return "arm"
    if "amx_tile" in flags and flags & {"amx_bf16", "amx_int8"}:
        return "amx"
    return next((level for level, needed in LEVELS if flags.issuperset(needed)), "generic")


def read_cpu(sources: Sources) -> Found:
    """The CPU as one device: model, usable cores, memory of this machine or container."""
    notes: list[str] = []
    info = _cpuinfo(sources)
    if info is None:
        notes.append("no /proc/cpuinfo: instruction sets unknown")
        info = {}
    flags = frozenset((info.get("flags") or info.get("Features") or "").split())
    arch = cpu_arch(sources.machine, flags)
    name = info.get("model name") or info.get("Hardware") or sources.machine
    device = Device(arch, name, _memory(sources), _cores(sources), flags & FEATURES)
    return Found("cpu", (device,), present=1, notes=tuple(notes))


def _cpuinfo(sources: Sources) -> dict[str, str] | None:
    """Fields of the first processor."""
    text = sources.text("/proc/cpuinfo")
    if text is None:
        return None
    fields = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def _cores(sources: Sources) -> int | None:
    """CPUs that this process may use, a container's quota included."""
    cores = sources.cpus()
    quota = (sources.text("/sys/fs/cgroup/cpu.max") or "").split()
    if cores is None or len(quota) != 2 or not all(part.isdigit() for part in quota):
        return cores
    return min(cores, max(1, round(int(quota[0]) / int(quota[1]))))


def _memory(sources: Sources) -> int | None:
    limits = []
    for line in (sources.text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            limits.append(int(value.split()[0]) * 1024)
    container = sources.text("/sys/fs/cgroup/memory.max") or ""
    if container.isdigit():
        limits.append(int(container))
    return min(limits, default=None)
