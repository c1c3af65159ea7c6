"""What a compiled kernel costs, read from its binary and assembly: no driver needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from anyattn.errors import LibraryError

__all__ = [
    "Usage",
    "amd_usage",
    "async_copies",
    "global_loads",
    "matrix_instructions",
    "nvidia_usage",
    "read_usage",
]


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel.

    Attributes:
        shared: bytes of shared memory a block asks for.
        registers: per thread (AMD: vector registers, accumulation registers included).
        spill_bytes: stack (AMD: scratch) bytes per thread. `spilled_registers`: AMD, vector registers.
        occupancy: AMD, waves per SIMD as the compiler reports it.
        matrix: kinds of matrix instructions, most frequent first.
        loads: reads of global memory in the code, bytes a thread reads at once -> how many instructions;
            asynchronous copies included. `copies`: CUDA, the asynchronous ones alone.
        tensor_memory: columns of tensor memory (sm_100 and later of its family); a chip has 512.
    """

    shared: int
    registers: int
    spill_bytes: int = 0
    spilled_registers: int = 0
    occupancy: int | None = None
    matrix: tuple[str, ...] = ()
    loads: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    tensor_memory: int = 0

    @property
    def spills(self) -> str:
        """`0`, or what spills, in words."""
        parts = [f"{self.spilled_registers} registers"] if self.spilled_registers else []
        parts += [f"{self.spill_bytes} B"] if self.spill_bytes else []
        return ", ".join(parts) or "0"


_MATRIX = {
    "cuda": re.compile(
        r"\b(wgmma)\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)"
        r"|\b(tcgen05)\.mma\.(?:cta_group::\d\.)?(kind::\w+)"
        r"|\b(mma\.sync)\.aligned\.(m\d+n\d+k\d+)"
    ),
    "hip": re.compile(r"\b(v_(?:mfma|wmma|smfmac|swmmac)_\w+)"),
}


def matrix_instructions(assembly: str, backend: str) -> tuple[str, ...]:
    """Kinds of matrix instructions in PTX or AMD assembly, most frequent first."""
    counts: dict[str, int] = {}
    for groups in _MATRIX[backend].findall(assembly):
        parts: Iterable[str] = [groups] if isinstance(groups, str) else (g for g in groups if g)
        name = " ".join(parts)
        counts[name] = counts.get(name, 0) + 1
    return tuple(sorted(counts, key=lambda name: (-counts[name], name)))


_LOADS = {
    "cuda": re.compile(r"\bld\.global(?:\.[a-zA-Z]\w*(?:::\w+)?)*?(?:\.v(\d))?\.[busf]x?(\d+)\b"),
    "hip": re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_|async_to_lds_)?(?:d16_)?(?:hi_)?([a-z]+\d*)"),
}
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], *\[[^]]*\], *(0x[0-9a-f]+|\d+)")
_BULK = re.compile(r"\bcp\.async\.bulk\.(?:tensor|shared)")
_AMD_BYTES = {
    **dict.fromkeys(("ubyte", "sbyte", "u8", "i8", "b8"), 1),
    **dict.fromkeys(("ushort", "sshort", "short", "u16", "i16", "b16"), 2),
    **dict.fromkeys(("dword", "b32"), 4),
    **dict.fromkeys(("dwordx2", "b64"), 8),
    **dict.fromkeys(("dwordx3", "b96"), 12),
    **dict.fromkeys(("dwordx4", "b128"), 16),
}


def async_copies(ptx: str) -> dict[int, int]:
    """`cp.async` in PTX by bytes; a bulk copy (TMA) counts as 16 bytes."""
    sizes = Counter(int(size, 0) for size in _COPY.findall(ptx))
    sizes[16] += len(_BULK.findall(ptx))
    return dict(sorted((+sizes).items()))


def global_loads(assembly: str, backend: str) -> dict[int, int]:
    """Reads of global memory in PTX or AMD assembly, by bytes a thread reads at once. Scalar-unit loads
    (AMD's `s_load`: the same address for a wave) don't count.
    """
    found = _LOADS[backend].findall(assembly)
    if backend == "hip":
        sizes = Counter(_AMD_BYTES[name] for name in found if name in _AMD_BYTES)
    else:
        sizes = Counter(int(width or 1) * int(bits) // 8 for width, bits in found)
        sizes.update(async_copies(assembly))
    return dict(sorted(sizes.items()))


def nvidia_usage(resources: str, shared: int, ptx: str, tensor_memory: int = 0) -> Usage:
    """From `cuobjdump --dump-resource-usage`; `shared` is what Triton asks for at launch."""
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    if not found:
        raise LibraryError("cuobjdump names no kernel", asked=resources.strip()[-200:] or "no output")
    numbers = [tuple(int(n) for n in row) for row in found]
    return Usage(
        shared=shared,
        registers=max(row[0] for row in numbers),
        spill_bytes=max(max(row[1:]) for row in numbers),
        matrix=matrix_instructions(ptx, "cuda"),
        loads=global_loads(ptx, "cuda"),
        copies=async_copies(ptx),
        tensor_memory=tensor_memory,
    )


def amd_usage(assembly: str, shared: int) -> Usage:
    """From the metadata that LLVM writes behind the code."""

    def field(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s+(\d+)", assembly)), default=0)

    occupancy = re.search(r"; Occupancy: (\d+)", assembly)
    return Usage(
        shared=shared,
        registers=field("vgpr_count"),
        spill_bytes=field("private_segment_fixed_size"),
        spilled_registers=field("vgpr_spill_count"),
        occupancy=int(occupancy[1]) if occupancy else None,
        matrix=matrix_instructions(assembly, "hip"),
        loads=global_loads(assembly, "hip"),
    )


def read_usage(compiled: Any, backend: str) -> Usage:
    """Usage of a `triton.compiler.CompiledKernel` for `backend` (`cuda` or `hip`)."""
    shared = int(compiled.metadata.shared)
    if backend == "hip":
        return amd_usage(compiled.asm["amdgcn"], shared)
    tensor_memory = int(getattr(compiled.metadata, "tmem_size", 0) or 0)
    return nvidia_usage(_cuobjdump(compiled.asm["cubin"]), shared, compiled.asm["ptx"], tensor_memory)


def _cuobjdump(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
