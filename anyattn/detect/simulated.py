"""Hosts that can be simulated: one typical product for each architecture. Data only.

Sizes are the vendors' data sheets'; they inform the reader, no capability row reads them.
"""

from __future__ import annotations

from anyattn.core.platform_record import SimulatedHost

__all__ = ["HOSTS", "RUNTIMES", "TORCH", "SimulatedHost"]

GIB = 1 << 30

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
_AMX = _AVX512 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16", "avx_vnni"}
_ARM = frozenset({"asimd", "asimddp", "asimdhp", "sve", "sve2", "bf16", "i8mm"})

HOSTS: dict[str, SimulatedHost] = {
    "cuda:sm80": SimulatedHost("NVIDIA A100-SXM4-80GB", 80 * GIB, 108),
    "cuda:sm86": SimulatedHost("NVIDIA A10", 24 * GIB, 72),
    "cuda:sm89": SimulatedHost("NVIDIA L40S", 48 * GIB, 142),
    "cuda:sm90": SimulatedHost("NVIDIA H200", 141 * GIB, 132),
    "cuda:sm100": SimulatedHost("NVIDIA B200", 180 * GIB, 148),
    "cuda:sm103": SimulatedHost("NVIDIA B300", 270 * GIB, 148),
    "cuda:sm110": SimulatedHost("NVIDIA Thor", 128 * GIB, 20),
    "cuda:sm120": SimulatedHost("NVIDIA GeForce RTX 5090", 32 * GIB, 170),
    "cuda:sm121": SimulatedHost("NVIDIA GB10", 128 * GIB, 48),
    "rocm:gfx90a": SimulatedHost("AMD Instinct MI250X", 64 * GIB, 110),
    "rocm:gfx942": SimulatedHost("AMD Instinct MI300X", 192 * GIB, 304),
    "rocm:gfx950": SimulatedHost("AMD Instinct MI355X", 288 * GIB, 256),
    "rocm:gfx1100": SimulatedHost("AMD Radeon RX 7900 XTX", 24 * GIB, 96),
    "rocm:gfx1151": SimulatedHost("AMD Radeon 8060S", 96 * GIB, 40),
    "rocm:gfx1200": SimulatedHost("AMD Radeon RX 9060 XT", 16 * GIB, 32),
    "rocm:gfx1201": SimulatedHost("AMD Radeon RX 9070 XT", 16 * GIB, 64),
    "ascend:910b": SimulatedHost("Ascend 910B", 64 * GIB, 24, machine="aarch64"),
    "ascend:910c": SimulatedHost("Ascend 910C", 64 * GIB, 24, machine="aarch64"),
    "ascend:310p": SimulatedHost("Ascend 310P", 24 * GIB, 8, machine="aarch64"),
    "cpu:amx": SimulatedHost("Intel Xeon Platinum 8480+", 512 * GIB, 56, _AMX),
    "cpu:avx512": SimulatedHost("AMD EPYC 9654", 768 * GIB, 96, _AVX512),
    "cpu:avx2": SimulatedHost("AMD EPYC 7763", 512 * GIB, 64, _AVX2),
    "cpu:arm": SimulatedHost("Arm Neoverse-V2", 480 * GIB, 72, _ARM, machine="aarch64"),
    "cpu:generic": SimulatedHost("x86-64 without AVX2", 16 * GIB, 4),
}

RUNTIMES: dict[str, str | None] = {"cuda": "13.0", "rocm": "7.0", "ascend": "8.5", "cpu": None}
"""CUDA, ROCm or CANN version that the driver supports."""

TORCH: dict[str, tuple[str, str]] = {
    "cuda": ("2.14.1", "cuda 13.0"),
    "rocm": ("2.14.1", "rocm 7.0"),
    "ascend": ("2.14.0", "cpu"),
    "cpu": ("2.13.0", "cpu"),
}
"""torch version and build; those that the recorded libraries of the platform ask for."""
