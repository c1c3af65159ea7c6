"""Ahead-of-time compilation of the package's own launches, for chips that aren't there.

An entry calls the ordinary host function with meta tensors; the launch seam hands over what would have been
launched, and Triton's own JIT specialises and compiles it for the target. So what is compiled is what a
device would run: no signature is written down twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from anyattn.errors import ConfigError, LibraryError
from anyattn.kernels.triton.aot_report import Report
from anyattn.kernels.triton.aot_usage import Usage, read_usage
from anyattn.kernels.triton.launch import set_hook

__all__ = [
    "ALL_TARGETS",
    "RELATED",
    "TARGETS",
    "Entry",
    "Launch",
    "Target",
    "compile_launch",
    "measure",
    "record",
    "scalar_reads",
]

KIB = 1024
TENSOR_COLUMNS = 512  # PTX ISA, tcgen05: 512 columns of tensor memory a CTA
VECTOR_BYTES = 8


@dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Attributes:
        shared_limit: bytes of shared memory (LDS) that one thread block (workgroup) may have. CUDA: CUDA
            Programming Guide 13, section 5.1.3, table 31, "Maximum amount of shared memory per thread block"
            (163 KB on 8.0 and 8.7, 99 KB on 8.6, 8.9 and 12.x, 227 KB on 9.0, 10.0 and 11.0):
            docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html.
            AMD: "AMD GPU specifications", column LDS (gfx90a, gfx942 64 KiB, gfx950 160 KiB; RDNA 3 and 4
            have 128 KiB a work-group processor, of which a workgroup may have 64):
            rocm.docs.amd.com/en/latest/reference/gpu-specs.html, and LLVM's limits for these targets.
        units: SMs (compute units) of a usual part, for rules that fit a grid to the chip.
        like: the default target that this one takes its entries and accepted spills from.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    units: int
    like: str = ""

    @property
    def listed(self) -> str:
        """Its name in an entry's `targets` and `spills`."""
        return self.like or self.name


def _cuda(arch: int, shared_kib: int, units: int, like: str = "") -> Target:
    return Target(f"sm_{arch}", "cuda", arch, 32, shared_kib * KIB, units, like)


def _hip(arch: str, shared_kib: int, units: int, like: str = "") -> Target:
    return Target(arch, "hip", arch, 64 if arch.startswith("gfx9") else 32, shared_kib * KIB, units, like)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        _cuda(80, 163, 108), _cuda(86, 99, 84), _cuda(89, 99, 142), _cuda(90, 227, 132),
        _cuda(100, 227, 148), _cuda(120, 99, 188),
        _hip("gfx90a", 64, 104), _hip("gfx942", 64, 304), _hip("gfx950", 160, 256),
        _hip("gfx1100", 64, 96), _hip("gfx1201", 64, 64),
    )
}  # fmt: skip
"""Every chip that the default list is compiled for."""

RELATED: dict[str, Target] = {
    t.name: t
    for t in (
        _cuda(87, 163, 16, "sm_80"), _cuda(103, 227, 148, "sm_100"), _cuda(110, 227, 20, "sm_100"),
        _cuda(121, 99, 48, "sm_120"), _hip("gfx1151", 64, 40, "gfx1100"), _hip("gfx1200", 64, 32, "gfx1201"),
    )
}  # fmt: skip
"""Chips with rows of their own in the tables whose code is that of a relative: compiled when asked for."""

ALL_TARGETS: dict[str, Target] = {**TARGETS, **RELATED}


@dataclass(frozen=True)
class Entry:
    """One kernel configuration.

    Attributes:
        build: calls a host function of this package with tensors on the meta device, sized as in service
            (sizes decide specialisation: 2 GiB and alignment). It may ask the target for its tiles.
        kernel: name of the kernel that counts, where `build` launches several.
        matrix: the kernel has dots, and they must compile to matrix instructions.
        spills: target -> why its spills stand. Other spills are a failure.
        element: bytes of a KV element, where K and V must be read in vectors; 0 = reads aren't judged.
    """

    name: str
    build: Callable[[Target], None]
    targets: Sequence[str] = tuple(TARGETS)
    kernel: str | None = None
    matrix: bool = False
    spills: Mapping[str, str] = field(default_factory=dict)
    element: int = 0


@dataclass(frozen=True)
class Launch:
    """What the seam was asked to start."""

    kernel: Any
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    options: dict[str, int]


def record(entry: Entry, target: Target) -> Launch:
    """The launch that `entry` stands for, not started.

    Raises:
        ConfigError: `build` launches no kernel of that name, or several.
    """
    seen: list[Launch] = []

    def hook(
        kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constexprs: dict[str, Any],
        options: dict[str, int],
    ) -> bool:  # fmt: skip
        seen.append(Launch(kernel, tuple(args), dict(constexprs), dict(options)))
        return True

    previous = set_hook(hook)
    try:
        entry.build(target)
    finally:
        set_hook(previous)
    names = [launch.kernel.__name__ for launch in seen]
    wanted = [launch for launch in seen if entry.kernel in (None, launch.kernel.__name__)]
    if len(wanted) != 1:
        raise ConfigError(
            f"entry {entry.name!r} must stand for one launch",
            asked=entry.kernel,
            allowed=", ".join(names) or "nothing was launched",
            hint="name the kernel that counts in Entry(kernel=…)",
        )
    return wanted[0]


class _NoDevice:
    """What Triton's JIT asks of a driver before it compiles; it never comes to loading or launching."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        # Triton keeps compiled kernels by device number: each target is a device of its own.
        self._device = 1000 + list(ALL_TARGETS).index(target.name)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_launch(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel for `target`, from the specialisation that its JIT makes of the arguments.

    Raises:
        LibraryError: kernels of this process are interpreted.
    """
    if not hasattr(launch.kernel, "warmup") or os.environ.get("TRITON_INTERPRET") == "1":
        raise LibraryError(
            "interpreted kernels can't be compiled", asked="TRITON_INTERPRET=1", hint="unset TRITON_INTERPRET"
        )
    driver.set_active(_NoDevice(target))
    return launch.kernel.warmup(*launch.args, grid=(1,), **launch.constexprs, **launch.options)


def measure(entry: Entry, target: Target) -> Report:
    """Compile one entry for one target and read what it costs. Errors on the way are part of the report."""
    report = Report(entry.name, entry.kernel or "", target.name, target.shared_limit)
    try:
        launch = record(entry, target)
        report.kernel = launch.kernel.__name__
        report.constexprs, report.options = launch.constexprs, launch.options
        begin = time.perf_counter()
        compiled = compile_launch(launch, target)
        report.seconds = round(time.perf_counter() - begin, 2)
    except Exception as error:  # compilers raise anything
        report.problems.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return report
    report.signature = dict(compiled.src.signature)
    report.usage = read_usage(compiled, target.backend)
    _judge(report, report.usage, entry, target)
    return report


def _judge(report: Report, usage: Usage, entry: Entry, target: Target) -> None:
    """What is wrong with a compiled kernel, and what was accepted beforehand."""
    if usage.shared > target.shared_limit:
        report.problems.append(f"{usage.shared} B of shared memory, the chip has {target.shared_limit}")
    threads = report.options["num_warps"] * target.warp_size
    if target.backend == "cuda" and usage.registers * threads > 65536:
        report.problems.append(f"{usage.registers} registers x {threads} threads: more than 65536")
    if usage.spill_bytes or usage.spilled_registers:
        reason = entry.spills.get(target.listed)
        if reason is None:
            report.problems.append(f"spills ({usage.spills})")
        else:
            report.notes.append(f"spills ({usage.spills}): {reason}")
    if usage.tensor_memory > TENSOR_COLUMNS:
        report.problems.append(f"{usage.tensor_memory} columns of tensor memory, of {TENSOR_COLUMNS}")
    if entry.matrix and not usage.matrix:
        report.problems.append("dots without matrix instructions")
    if entry.element:
        report.problems += scalar_reads(usage, entry.element, target)


def scalar_reads(usage: Usage, element: int, target: Target) -> list[str]:
    """What says that K or V, of `element` bytes, are read one by one: once, a lost alignment hint made
    page-1 decode three times slower and changed nothing else.

    Tables and sinks may be single reads of that size too, but fewer than the vectors of K and V; of float32,
    which tables' entries are as wide as, four times as many. Of 8-bit elements, two at a time are single.
    """
    single = usage.loads.get(element, 0) + (usage.loads.get(2, 0) if element == 1 else 0)
    vectors = sum(count for size, count in usage.loads.items() if size >= VECTOR_BYTES)
    found = []
    if single > vectors * (4 if element == 4 else 1):
        found.append(f"scalar loads: {single} of {element} B, {vectors} of {VECTOR_BYTES} B or more")
    if target.backend == "cuda":
        narrow = sum(count for size, count in usage.copies.items() if size < VECTOR_BYTES)
        if not usage.copies or narrow:
            found.append(f"cp.async: {narrow} of less than {VECTOR_BYTES} B, of {sum(usage.copies.values())}")
    return found
