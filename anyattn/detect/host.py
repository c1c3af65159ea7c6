"""`detect_host`: the readers put together, and the choice of the platform that torch can drive."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable

from anyattn.core.facts import HostFacts, LibraryFacts
from anyattn.detect.ascend import read_ascend
from anyattn.detect.builds import with_builds
from anyattn.detect.cpu import read_cpu
from anyattn.detect.found import Device, Found
from anyattn.detect.kfd import read_rocm
from anyattn.detect.known import KNOWN
from anyattn.detect.libraries import read_libraries
from anyattn.detect.library import Library
from anyattn.detect.nvml import read_cuda
from anyattn.detect.sources import Sources
from anyattn.detect.torch_build import TorchBuild, read_torch
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["DEVICE_TYPES", "detect_host"]

READERS: dict[str, Callable[[Sources], Found]] = {
    "cuda": read_cuda,
    "rocm": read_rocm,
    "ascend": read_ascend,
    "cpu": read_cpu,
}
"""Platform -> reader, in the order of preference where nothing else decides."""

DEVICE_TYPES: dict[str, tuple[str, ...]] = {
    "cuda": ("cuda", "rocm"),  # torch calls both "cuda"
    "npu": ("ascend",),
    "cpu": ("cpu",),
}
"""torch's device type -> the platforms that may stand behind it."""

TORCH_FOR = {
    "cuda": "install a CUDA build of torch: https://pytorch.org/get-started/locally",
    "rocm": "install a ROCm build of torch: https://pytorch.org/get-started/locally",
    "ascend": "pip install torch-npu with the torch version that it names",
}


def detect_host(
    device: str | None = None, *, sources: Sources | None = None, extra: Iterable[Library] = ()
) -> HostFacts:
    """Facts of this machine, without a device context and without importing torch or a library.

    Args:
        device: a torch device (`"cuda"`, `"cuda:1"`, `"npu:0"`, `"cpu"`). None takes the accelerator that
            the installed torch can drive, else the CPU; without a torch, the first accelerator found.
        sources: where to look, for tests.
        extra: libraries of plugins, to be looked up besides the known ones.

    Raises:
        ConfigError: `device` was given and isn't there, or the installed torch can't drive it. Detection
            itself never raises: what can't be read is a note.
    """
    sources = sources or Sources()
    torch = _torch(sources)
    libraries, notes = read_libraries(sources, torch.version, (*KNOWN.values(), *extra))
    if torch.stray:
        libraries["torch"] = LibraryFacts("torch", torch.version, ("torch",), reason=torch.note)
    drivable = _drivable(torch, has_npu="torch-npu" in libraries)
    if device is None:
        found, index, more = _automatic(drivable, torch, sources)
        notes += more
    else:
        found, index = _explicit(str(device), drivable, torch, sources)
    chosen = found.devices[index]
    return HostFacts(
        platform=found.platform,
        arch=chosen.arch,
        device_name=chosen.name,
        device_count=len(found.devices),
        memory_bytes=chosen.memory_bytes,
        num_units=chosen.num_units,
        features=chosen.features,
        driver=found.driver,
        runtime=found.runtime or _runtime_of_build(found.platform, torch.build),
        python=".".join(map(str, sys.version_info[:3])),
        torch=torch.version,
        torch_build=torch.build,
        libraries=with_builds(libraries, found.platform, chosen.arch, sources),
        notes=(*found.notes, *_unequal(found, index), *filter(None, [torch.note]), *notes),
    )


def _torch(sources: Sources) -> TorchBuild:
    try:
        return read_torch(sources)
    except Exception as error:  # odd metadata of any kind mustn't stop detection
        return TorchBuild(note=f"torch can't be looked up: {type(error).__name__}: {error}")


def _read(platform: str, sources: Sources) -> Found:
    """One platform's devices; a failure is a note. The CPU is always there."""
    try:
        return READERS[platform](sources)
    except Exception as error:
        note = f"{platform} can't be looked up: {type(error).__name__}: {error}"
        devices = (Device("generic", sources.machine),) if platform == "cpu" else ()
        return Found(platform, devices, notes=(note,))


def _drivable(torch: TorchBuild, *, has_npu: bool) -> tuple[str, ...]:
    """Platforms that this torch can drive, best first; all of them where its build is unknown."""
    if torch.build is None:
        return tuple(READERS)
    kind = torch.build.partition(" ")[0]
    if kind in ("cuda", "rocm"):
        return (kind, "cpu")
    return ("ascend", "cpu") if has_npu else ("cpu",)


def _automatic(
    drivable: tuple[str, ...], torch: TorchBuild, sources: Sources
) -> tuple[Found, int, tuple[str, ...]]:
    notes: list[str] = []
    chosen = None
    for platform in READERS:
        if platform == "cpu" and chosen:
            continue
        found = _read(platform, sources)
        if platform in drivable and found.devices and chosen is None:
            chosen = found
            continue
        notes += found.notes
        if platform in drivable and found.present:
            notes.append(f"{platform} devices here: {found.present}, visible: none{_hidden(found)}")
        elif platform in drivable and torch.build is not None and platform != "cpu":
            notes.append(f"torch is built for {torch.build}, but there is no {platform} device")
        elif found.devices and platform not in drivable:
            name = found.devices[0].name
            notes.append(f"{name} is here, but torch {torch.version} can't drive it: {TORCH_FOR[platform]}")
    assert chosen is not None  # the CPU is always there and always drivable
    return chosen, 0, tuple(notes)


def _explicit(
    device: str, drivable: tuple[str, ...], torch: TorchBuild, sources: Sources
) -> tuple[Found, int]:
    kind, _, number = device.partition(":")
    if kind not in DEVICE_TYPES:
        raise UnknownNameError("device type", kind, DEVICE_TYPES)
    if not re.fullmatch(r"\w+(:\d+)?", device):
        raise ConfigError("a device that can't be read", asked=repr(device), allowed=f"{kind}, {kind}:NUMBER")
    platforms = [platform for platform in DEVICE_TYPES[kind] if platform in drivable]
    if not platforms:
        raise ConfigError(
            f"torch {torch.version} can't drive the device",
            asked=device,
            allowed=", ".join(k for k, names in DEVICE_TYPES.items() if set(names) & set(drivable)),
            hint=TORCH_FOR[DEVICE_TYPES[kind][0]],
        )
    candidates = [_read(platform, sources) for platform in platforms]
    found = next((candidate for candidate in candidates if candidate.devices), candidates[0])
    index = int(number or 0)
    if index >= len(found.devices):
        raise _absent(device, kind, found)
    return found, index


def _absent(device: str, kind: str, found: Found) -> ConfigError:
    count = len(found.devices)
    there = "cpu" if not count else kind if count == 1 else f"{kind}:0 … {kind}:{count - 1}"
    reasons = "; ".join(found.notes)
    return ConfigError(
        f"the device isn't there: {count} visible of {found.present}{_hidden(found)}",
        asked=device,
        allowed=there,
        hint=reasons or "run `anyattn doctor` to see what was found",
    )


def _hidden(found: Found) -> str:
    return f" ({', '.join(found.filtered_by)} hides some)" if found.filtered_by else ""


def _unequal(found: Found, index: int) -> tuple[str, ...]:
    others = sorted({device.arch for device in found.devices} - {found.devices[index].arch})
    if not others:
        return ()
    return (f"devices differ: these facts are of number {index}, others are {', '.join(others)}",)


def _runtime_of_build(platform: str, build: str | None) -> str | None:
    """Without an installed runtime, the one inside torch's wheel counts."""
    kind, _, version = (build or "").partition(" ")
    return version if kind == platform and version else None
