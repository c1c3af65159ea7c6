"""Machines that don't exist: file trees, an NVML library, installed distributions."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyattn.detect import Sources
from anyattn.detect.kfd import NODES

SUCCESS, NOT_SUPPORTED, NOT_FOUND = 0, 3, 6


def no_driver() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def write(root: Path, files: Mapping[str, str]) -> None:
    """Files under `root` by absolute path."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def sources(
    root: Path,
    environ: Mapping[str, str] | None = None,
    *,
    nvml: Callable[[], Any] = no_driver,
    path: tuple[str, ...] = (),
    machine: str = "x86_64",
    cpus: int | None = 8,
) -> Sources:
    """Sources that see nothing of the real machine."""
    return Sources(
        root=root, environ=dict(environ or {}), path=path, machine=machine, nvml=nvml, cpus=lambda: cpus
    )


@dataclass
class FakeMig:
    """A MIG instance."""

    uuid: str
    name: str = "NVIDIA H200 MIG 1g.18gb"
    memory_mib: int = 16384
    sms: int = 16
    gpu_instance: int = 1
    compute_instance: int = 0


@dataclass
class FakeGpu:
    """A GPU as NVML shows it."""

    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 150_754_820_096
    cores: int = 132 * 128
    mig: bool = False
    instances: list[FakeMig | None] = field(default_factory=list)


class FakeNvml:
    """The ctypes functions that detection calls. `missing` ones don't exist, `failing` return a status."""

    def __init__(
        self, *gpus: FakeGpu, missing: tuple[str, ...] = (), failing: Mapping[str, int] = {}
    ) -> None:
        self.gpus, self.missing, self.failing = gpus, missing, failing
        self.calls: list[str] = []
        self.objects: list[Any] = [None, *gpus]

    def __call__(self) -> FakeNvml:
        return self

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.missing or not name.startswith("nvml"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            return int(getattr(self, f"_{name}")(*arguments))

        return function

    def _handle(self, thing: Any) -> int:
        if thing not in self.objects:
            self.objects.append(thing)
        return next(i for i, known in enumerate(self.objects) if known is thing)

    def _thing(self, handle: ctypes.c_void_p) -> Any:
        return self.objects[handle.value or 0]

    @staticmethod
    def _put(text: str, buffer: Any) -> int:
        buffer.value = text.encode()
        return SUCCESS

    def _nvmlInit_v2(self) -> int:
        return SUCCESS

    def _nvmlShutdown(self) -> int:
        return SUCCESS

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return SUCCESS

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = self._handle(self.gpus[index.value])
        return SUCCESS

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._thing(handle).capability
        return SUCCESS

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._put(self._thing(handle).uuid, buffer)

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._put(self._thing(handle).name, buffer)

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._thing(handle).memory
        return SUCCESS

    def _nvmlDeviceGetNumGpuCores(self, handle: Any, cores: Any) -> int:
        cores._obj.value = self._thing(handle).cores
        return SUCCESS

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        current._obj.value = pending._obj.value = int(self._thing(handle).mig)
        return SUCCESS

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return SUCCESS

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, instance: Any) -> int:
        instances = self._thing(handle).instances
        if index.value >= len(instances) or instances[index.value] is None:
            return NOT_FOUND
        instance._obj.value = self._handle(instances[index.value])
        return SUCCESS

    def _nvmlDeviceGetAttributes_v2(self, handle: Any, attributes: Any) -> int:
        instance = self._thing(handle)
        attributes._obj.multiprocessorCount = instance.sms
        attributes._obj.memorySizeMB = instance.memory_mib
        return SUCCESS

    def _nvmlDeviceGetGpuInstanceId(self, handle: Any, number: Any) -> int:
        number._obj.value = self._thing(handle).gpu_instance
        return SUCCESS

    def _nvmlDeviceGetComputeInstanceId(self, handle: Any, number: Any) -> int:
        number._obj.value = self._thing(handle).compute_instance
        return SUCCESS

    def _nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        return self._put("580.95.05", buffer)

    def _nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = 13010
        return SUCCESS


def install(
    site: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: tuple[str, ...] = (),
    metadata: str | None = None,
    record: bool = True,
    at: float | None = None,
) -> Path:
    """Install a distribution into `site` as pip would: files, METADATA, RECORD with hashes and sizes."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    lines = []
    for path, text in files.items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}")
    info.mkdir(parents=True)
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    header += "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(header + "\nVersion: not this one\n" if metadata is None else metadata)
    if record:
        (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]))
        if at is not None:
            os.utime(info / "RECORD", (at, at))
    return info


def add_gpu(root: Path, node: int, version: int = 90402, minor: int = 128, **more: int) -> None:
    """An MI300X as a KFD node."""
    lines = {
        "simd_count": 1216,
        "simd_per_cu": 4,
        "gfx_target_version": version,
        "drm_render_minor": minor,
        "unique_id": 0xAB00 + node,
        "device_id": 0x74A1,
        **more,
    }
    banks = {
        "0": "heap_type 1\nsize_in_bytes 206141652992\nflags 0\n",
        "1": "heap_type 4\nsize_in_bytes 65536\n",  # LDS isn't device memory
    }
    write(root, {f"{NODES}/{node}/properties": "".join(f"{k} {v}\n" for k, v in lines.items())})
    write(root, {f"{NODES}/{node}/mem_banks/{k}/properties": v for k, v in banks.items()})
    write(root, {f"/dev/dri/renderD{minor}": ""})


def version_py(**fields: str) -> str:
    """torch/version.py of a build."""
    lines = ["from typing import Optional", "__version__ = '2.13.0'", "debug = False"]
    for name in ("cuda", "hip", "rocm", "xpu"):
        value = f"'{fields[name]}'" if name in fields else "None"
        lines.append(f"{name}: Optional[str] = {value}")
    return "\n".join(lines)
