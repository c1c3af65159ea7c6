"""CUDA facts through NVML by ctypes: no device context, no `pynvml`.

Structures and functions: NVML API reference. MIG rules: NVIDIA MIG user guide, "CUDA device
enumeration" (a process sees one MIG instance, and no whole GPU beside it).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anyattn.detect.found import Device, Found
from anyattn.detect.sources import Sources
from anyattn.detect.visible import choose, first_set

__all__ = ["read_cuda"]

CORES_PER_SM = {"sm80": 64} | dict.fromkeys(
    ("sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"), 128
)
"""FP32 lanes of an SM: NVML counts cores, not SMs (CUDA C++ programming guide, compute capabilities)."""


class NvmlError(Exception):
    """A call that the library lacks or that returned a status other than success."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("multiprocessorCount", ctypes.c_uint),
        ("sharedCopyEngineCount", ctypes.c_uint),
        ("sharedDecoderCount", ctypes.c_uint),
        ("sharedEncoderCount", ctypes.c_uint),
        ("sharedJpegCount", ctypes.c_uint),
        ("sharedOfaCount", ctypes.c_uint),
        ("gpuInstanceSliceCount", ctypes.c_uint),
        ("computeInstanceSliceCount", ctypes.c_uint),
        ("memorySizeMB", ctypes.c_ulonglong),
    )


class _Library:
    """NVML calls that raise `NvmlError`, whatever the driver is missing."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NvmlError(f"{name} is not in this driver") from error
        if status != 0:
            raise NvmlError(f"{name} returned status {status}")

    def text(self, name: str, *handle: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self.call(name, *handle, buffer, ctypes.c_uint(len(buffer)))
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(value))
        return value


@dataclass(frozen=True)
class _Gpu:
    """A whole GPU with its MIG instances; one with MIG on isn't a device itself."""

    uuid: str
    device: Device
    instances: tuple[tuple[tuple[str, ...], Device], ...] = ()
    mig: bool = False


def read_cuda(sources: Sources) -> Found:
    """GPUs that a CUDA process started here would see. Never raises; failures are notes."""
    try:
        library = _Library(sources.nvml())
        library.call("nvmlInit_v2")
    except OSError:
        return Found("cuda")
    except NvmlError as error:
        return Found("cuda", notes=(f"NVML is there but doesn't start: {error}",))
    try:
        return _read(library, sources)
    except NvmlError as error:
        return Found("cuda", notes=(f"NVML doesn't list the GPUs: {error}",))
    finally:
        with suppress(NvmlError):
            library.call("nvmlShutdown")


def _read(library: _Library, sources: Sources) -> Found:
    notes: list[str] = []
    gpus = [g for i in range(library.number("nvmlDeviceGetCount_v2")) if (g := _gpu(library, i, notes))]
    devices, filtered_by = _visible(gpus, sources, notes)
    if len({g.device.arch for g in gpus}) > 1 and sources.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append("GPUs differ and CUDA orders them by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    return Found(
        "cuda",
        tuple(devices),
        present=len(gpus),
        driver=_driver(library, notes),
        runtime=_runtime(library, notes),
        filtered_by=filtered_by,
        notes=tuple(notes),
    )


def _visible(gpus: list[_Gpu], sources: Sources, notes: list[str]) -> tuple[list[Device], tuple[str, ...]]:
    devices, indexed, named = _positions(gpus)
    asked = first_set(sources.environ, "CUDA_VISIBLE_DEVICES")
    chosen = [devices[i] for i in (indexed if asked is None else choose(asked[1], indexed, named))]
    visible = [device for device in chosen if device is not None]
    if len(visible) < len(chosen):
        notes.append("a GPU in MIG mode has no instance: create one (nvidia-smi mig -cgi … -C)")
    instances = [device for device in visible if "mig" in device.features]
    if instances and len(visible) > 1:
        notes.append("a process sees one MIG instance and no whole GPU beside it: the first one is taken")
        visible = instances[:1]
    return visible, ("CUDA_VISIBLE_DEVICES",) if asked and len(visible) < len(gpus) else ()


def _positions(gpus: list[_Gpu]) -> tuple[list[Device | None], list[int], list[tuple[str, int]]]:
    """All devices, the position of each GPU (its first instance in MIG mode), names with positions."""
    devices: list[Device | None] = []
    indexed, named = [], []
    for gpu in gpus:
        indexed.append(len(devices))
        named.append((gpu.uuid, len(devices)))
        for names, instance in gpu.instances:
            named += [(name, len(devices)) for name in names]
            devices.append(instance)
        if not gpu.instances:
            devices.append(None if gpu.mig else gpu.device)
    return devices, indexed, named


def _gpu(library: _Library, index: int, notes: list[str]) -> _Gpu | None:
    try:
        handle = library.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        arch = f"sm{major.value * 10 + minor.value}"
        uuid = library.text("nvmlDeviceGetUUID", handle)
        device = Device(arch, library.text("nvmlDeviceGetName", handle), _memory(library, handle))
    except NvmlError as error:
        notes.append(f"GPU {index} left out: {error}")
        return None
    if _in_mig_mode(library, handle):
        return _Gpu(uuid, device, tuple(_instances(library, handle, uuid, device, notes)), mig=True)
    units = _units(library, handle, arch)
    return _Gpu(uuid, Device(arch, device.name, device.memory_bytes, units))


def _memory(library: _Library, handle: ctypes.c_void_p) -> int | None:
    memory = _Memory()
    try:
        library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except NvmlError:  # integrated GPUs have none of their own
        return None
    return int(memory.total)


def _units(library: _Library, handle: ctypes.c_void_p, arch: str) -> int | None:
    try:
        cores = library.number("nvmlDeviceGetNumGpuCores", handle)
    except NvmlError:
        return None
    return cores // CORES_PER_SM[arch] if arch in CORES_PER_SM else None


def _in_mig_mode(library: _Library, handle: ctypes.c_void_p) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        library.call("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    except NvmlError:
        return False
    return current.value == 1


def _instances(
    library: _Library, gpu: ctypes.c_void_p, uuid: str, whole: Device, notes: list[str]
) -> list[tuple[tuple[str, ...], Device]]:
    found = []
    try:
        count = library.number("nvmlDeviceGetMaxMigDeviceCount", gpu)
    except NvmlError as error:
        notes.append(f"MIG instances of {whole.name} can't be listed: {error}")
        return []
    for index in range(count):
        try:
            handle = library.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, ctypes.c_uint(index))
        except NvmlError:  # an unused place
            continue
        try:
            found.append(_instance(library, handle, uuid, whole))
        except NvmlError as error:
            notes.append(f"MIG instance {index} of {whole.name} left out: {error}")
    return found


def _instance(
    library: _Library, handle: ctypes.c_void_p, gpu_uuid: str, whole: Device
) -> tuple[tuple[str, ...], Device]:
    names = [library.text("nvmlDeviceGetUUID", handle)]
    attributes = _Attributes()
    library.call("nvmlDeviceGetAttributes_v2", handle, ctypes.byref(attributes))
    try:  # the form of older drivers: MIG-<GPU UUID>/<GPU instance>/<compute instance>
        gpu_instance = library.number("nvmlDeviceGetGpuInstanceId", handle)
        compute_instance = library.number("nvmlDeviceGetComputeInstanceId", handle)
        names.append(f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}")
    except NvmlError:
        pass
    device = Device(
        whole.arch,
        library.text("nvmlDeviceGetName", handle),
        attributes.memorySizeMB << 20,
        attributes.multiprocessorCount,
        frozenset({"mig"}),
    )
    return tuple(names), device


def _driver(library: _Library, notes: list[str]) -> str | None:
    try:
        return library.text("nvmlSystemGetDriverVersion")
    except NvmlError as error:
        notes.append(f"driver version unknown: {error}")
        return None


def _runtime(library: _Library, notes: list[str]) -> str | None:
    """The newest CUDA version that the driver supports: NVML gives major · 1000 + minor · 10.

    NVML loads libcuda for this, but neither initialises it nor makes a context.
    """
    version = ctypes.c_int()
    try:
        library.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    except NvmlError as error:
        notes.append(f"CUDA version of the driver unknown: {error}")
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
