"""Ascend facts from device nodes and PCI ids: no CANN call, so nothing is initialised.

PCI ids (vendor 0x19e5) as Huawei's installation guides give them for `lspci`: d500 = Atlas 300I
(310P), d802 = Atlas A2 (910B), d803 = Atlas A3 (910_93, sold as 910C). Not run on Ascend hardware.
"""

from __future__ import annotations

import re
from pathlib import Path

from anyattn.detect.found import Device, Found
from anyattn.detect.sources import Sources
from anyattn.detect.visible import choose, first_set

__all__ = ["plain_version", "read_ascend"]

VENDOR = "0x19e5"
SOCS = {
    "0xd500": ("310p", "Ascend 310P"),
    "0xd801": ("910a", "Ascend 910A"),
    "0xd802": ("910b", "Ascend 910B"),
    "0xd803": ("910c", "Ascend 910C"),
}
HOMES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
VERSION = re.compile(r"^\s*version\s*=\s*\[?\s*\"?([\w.]+)", re.IGNORECASE | re.MULTILINE)


def read_ascend(sources: Sources) -> Found:
    """NPUs that a process started here would see. Never raises; failures are notes."""
    count = _count(sources)
    if not count:
        return Found("ascend")
    notes: list[str] = []
    arch, name = _soc(sources, notes)
    asked = first_set(sources.environ, "ASCEND_RT_VISIBLE_DEVICES")
    visible = count if asked is None else len(choose(asked[1], range(count)))
    runtime = _runtime(sources)
    if runtime is None:
        notes.append("no CANN toolkit found: set ASCEND_HOME_PATH (source set_env.sh), or install it")
    return Found(
        "ascend",
        (Device(arch, name),) * visible,
        present=count,
        driver=_version(sources.at("/usr/local/Ascend/driver/version.info")),
        runtime=runtime,
        filtered_by=(asked[0],) if asked and visible < count else (),
        notes=tuple(notes),
    )


def _count(sources: Sources) -> int:
    return sum(1 for p in sources.at("/dev").glob("davinci*") if p.name[len("davinci") :].isdigit())


def _soc(sources: Sources, notes: list[str]) -> tuple[str, str]:
    """(arch, name) by PCI id. A container sees all of the host's PCI devices, which are of one kind."""
    ids = set()
    for folder in sources.at("/sys/bus/pci/devices").glob("*"):
        vendor, device = _line(folder / "vendor"), _line(folder / "device")
        if vendor == VENDOR and device in SOCS:
            ids.add(device)
    if len(ids) > 1:
        notes.append(f"several kinds of NPU ({', '.join(sorted(ids))}): the first is taken for all")
    if ids:
        return SOCS[min(ids)]
    notes.append("NPU nodes without a known PCI id: architecture unknown")
    return "unknown", "Ascend NPU"


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip().lower()
    except OSError:
        return ""


def _runtime(sources: Sources) -> str | None:
    """Version of the CANN toolkit, from the file that its installer leaves."""
    set_by_user = [sources.environ.get("ASCEND_HOME_PATH"), sources.environ.get("ASCEND_TOOLKIT_HOME")]
    for home in (*filter(None, set_by_user), *HOMES):
        for file in sorted(sources.at(home).glob("*-linux/ascend_*_install.info")):
            if version := _version(file):
                return version
    return None


def _version(path: Path) -> str | None:
    match = VERSION.search(_line(path))
    return plain_version(match.group(1)) if match else None


def plain_version(text: str) -> str | None:
    """`8.2.RC1.alpha003` -> `8.2rc1`, so that version ranges can be compared; None if it is no version."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:\.?rc(\d+))?", text, re.IGNORECASE)
    if match is None:
        return None
    return match.group(1) + (f"rc{match.group(2)}" if match.group(2) else "")
