"""This machine's facts, platforms of plugins included."""

from __future__ import annotations

import importlib
from dataclasses import replace

from anyattn.core.facts import HostFacts
from anyattn.core.platform_record import PlatformRecord
from anyattn.detect.found import Found
from anyattn.detect.host import DEVICE_TYPES, detect_host
from anyattn.detect.plugins import PLATFORMS, Plugins, plugins
from anyattn.detect.sources import Sources
from anyattn.errors import ConfigError

__all__ = ["detect_machine"]


def detect_machine(
    device: str | None = None, *, sources: Sources | None = None, found: Plugins | None = None
) -> HostFacts:
    """As `detect_host`; a plugin's platform by its name or device type, or unasked where there is only a CPU.

    Raises:
        ConfigError: as `detect_host`; a plugin's device that isn't there, or whose plugin wasn't loaded.
    """
    sources, found = sources or Sources(), found or plugins()
    extra = found.libraries()
    if device is not None:
        kind, _, number = str(device).partition(":")
        wanted = [p for p in found.brought() if kind == p.name or (kind == p.device not in DEVICE_TYPES)]
        if not wanted:
            _refuse_unloaded(kind, found)
            return detect_host(device, sources=sources, extra=extra)
        base = detect_host("cpu", sources=sources, extra=extra)
        return _chosen(wanted[0], base, sources, int(number) if number.isdigit() else 0)
    base = detect_host(None, sources=sources, extra=extra)
    notes: list[str] = []
    for platform in found.brought():
        looked = _look(platform, sources)
        notes += looked.notes
        if not looked.devices:
            continue
        if base.platform == "cpu":
            return _facts(platform, looked, base, 0)
        notes.append(f"{looked.devices[0].name} is here too: device={platform.name!r} takes it")
    return replace(base, notes=(*base.notes, *notes)) if notes else base


def _refuse_unloaded(name: str, found: Plugins) -> None:
    for report in found.reports:
        fault = report.fault
        if fault is not None and (report.group, report.name) == (PLATFORMS, name):
            raise ConfigError(
                f"platform {name} is brought by {report.origin}, which is {report.state.value}",
                asked=f"device {name!r}: {fault.found}",
                allowed=fault.allowed,
                hint=fault.remedy,
            )


def _look(platform: PlatformRecord, sources: Sources) -> Found:
    """The plugin's reader; whatever it raises is a note."""
    try:
        module, _, name = platform.detect.partition(":")
        looked = getattr(importlib.import_module(module), name)(sources) if module else Found(platform.name)
        if not isinstance(looked, Found):
            raise TypeError(f"{platform.detect} returned {type(looked).__name__}, not Found")
        strange = [d.arch for d in looked.devices if f"{platform.name}:{d.arch}" not in platform.targets]
        if strange:
            raise ValueError(f"{platform.detect} found {', '.join(strange)}, which the record doesn't list")
    except (Exception, SystemExit) as error:
        note = f"{platform.name} of {platform.origin} can't be looked up: {type(error).__name__}: {error}"
        return Found(platform.name, notes=(note,))
    return looked


def _facts(platform: PlatformRecord, looked: Found, base: HostFacts, index: int) -> HostFacts:
    chosen = looked.devices[index]
    return replace(
        base,
        platform=platform.name,
        arch=chosen.arch,
        device_name=chosen.name,
        device_count=len(looked.devices),
        memory_bytes=chosen.memory_bytes,
        num_units=chosen.num_units,
        features=chosen.features,
        driver=looked.driver,
        runtime=looked.runtime,
        notes=(*base.notes, *looked.notes),
    )


def _chosen(platform: PlatformRecord, base: HostFacts, sources: Sources, index: int) -> HostFacts:
    looked = _look(platform, sources)
    if index >= len(looked.devices):
        last = len(looked.devices) - 1
        raise ConfigError(
            f"the device isn't there: {len(looked.devices)} visible of {platform.name}",
            asked=f"{platform.name}:{index}",
            allowed=f"{platform.name}:0 … {platform.name}:{last}" if looked.devices else "cpu",
            hint="; ".join(looked.notes) or f"see the documentation of {platform.origin}",
        )
    return _facts(platform, looked, base, index)
