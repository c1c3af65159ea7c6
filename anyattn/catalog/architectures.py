"""Exact architectures, `platform:arch`. Tuples are named by their members, never by a family."""

from __future__ import annotations

__all__ = [
    "ANY_ACCELERATOR",
    "ASCEND_310P",
    "ASCEND_910",
    "CPU",
    "CPU_AMX",
    "CPU_AVX512",
    "CPU_X86",
    "CUDA",
    "GFX11",
    "GFX11_12",
    "GFX12",
    "GFX90A",
    "GFX942",
    "GFX942_950",
    "GFX950",
    "KNOWN",
    "ROCM",
    "SM80",
    "SM80_86",
    "SM80_86_89",
    "SM89_UP",
    "SM90",
    "SM100_103",
    "SM100_103_110",
    "SM120",
    "SM120_121",
    "SM121",
]

SM80 = ("cuda:sm80",)
SM80_86 = ("cuda:sm80", "cuda:sm86")
SM80_86_89 = (*SM80_86, "cuda:sm89")
SM90 = ("cuda:sm90",)
SM100_103 = ("cuda:sm100", "cuda:sm103")
SM100_103_110 = (*SM100_103, "cuda:sm110")
SM120, SM121 = ("cuda:sm120",), ("cuda:sm121",)
SM120_121 = (*SM120, *SM121)
SM89_UP = ("cuda:sm89", *SM90, *SM100_103_110, *SM120_121)
CUDA = (*SM80_86, *SM89_UP)

GFX90A, GFX942, GFX950 = ("rocm:gfx90a",), ("rocm:gfx942",), ("rocm:gfx950",)
GFX942_950 = (*GFX942, *GFX950)
GFX11, GFX12 = ("rocm:gfx1100", "rocm:gfx1151"), ("rocm:gfx1200", "rocm:gfx1201")
GFX11_12 = (*GFX11, *GFX12)
ROCM = (*GFX90A, *GFX942_950, *GFX11_12)

ASCEND_910 = ("ascend:910b", "ascend:910c")
ASCEND_310P = ("ascend:310p",)

CPU_AMX, CPU_AVX512 = ("cpu:amx",), ("cpu:avx512",)
CPU_X86 = (*CPU_AMX, *CPU_AVX512, "cpu:avx2")
CPU = (*CPU_X86, "cpu:arm", "cpu:generic")

ANY_ACCELERATOR = ("cuda:*", "rocm:*", "ascend:*")
"""Chips that no row names: for plain torch alone."""

KNOWN = (*CUDA, *ROCM, *ASCEND_910, *ASCEND_310P, *CPU)
"""Every architecture that some row may name."""
