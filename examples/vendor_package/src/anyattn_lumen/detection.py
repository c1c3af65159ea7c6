"""Which Lumen chips are in this machine. No driver is loaded and no context is made."""

from __future__ import annotations

from anyattn.detect.found import Device, Found
from anyattn.detect.sources import Sources

__all__ = ["look"]

_CHIPS = {
    "l1": Device("l1", "Lumen L1", 32 << 30, 16),
    "l2": Device("l2", "Lumen L2", 96 << 30, 64),
}


def look(sources: Sources) -> Found:
    """Chips by their sysfs entries, or the one that LUMEN_SIMULATOR names (`l1`, `l2`).

    Everything is read through `sources`, so that a test can give a file tree of its own.
    """
    simulated = sources.environ.get("LUMEN_SIMULATOR")
    if simulated in _CHIPS:
        return Found("lumen", (_CHIPS[simulated],), present=1, driver="simulator", runtime="1.0")
    names = [
        path.read_text().strip().lower() for path in sorted(sources.at("/sys/class/lumen").glob("*/chip"))
    ]
    devices = tuple(_CHIPS[name] for name in names if name in _CHIPS)
    strange = tuple(f"Lumen chip {name!r} is newer than this package" for name in names if name not in _CHIPS)
    return Found("lumen", devices, present=len(names), runtime="1.0" if devices else None, notes=strange)
