"""ROCm facts from the KFD topology in sysfs: no HIP call, no device context.

Sources: Linux `amdkfd` (`gfx_target_version` = major · 10000 + minor · 100 + stepping; memory banks with
heap type 1 or 2 are device memory); ROCm's page on GPU isolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anyattn.detect.found import Device, Found
from anyattn.detect.sources import Sources
from anyattn.detect.visible import choose, first_set

__all__ = ["gfx_name", "read_rocm"]

NODES = "/sys/class/kfd/kfd/topology/nodes"
DEVICE_HEAPS = (1, 2)  # frame buffer, public and private

PRODUCTS = {
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X/MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""PCI device id -> name, for drivers that give no `product_name`."""


def gfx_name(version: int) -> str:
    """`gfx_target_version` as LLVM names it: 90010 -> gfx90a, 110501 -> gfx1151."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


@dataclass(frozen=True)
class _Node:
    uuid: str
    device: Device


def read_rocm(sources: Sources) -> Found:
    """GPUs that a HIP process started here would see. Never raises; failures are notes."""
    notes: list[str] = []
    nodes = [node for folder in _folders(sources) if (node := _node(folder, sources, notes))]
    visible, filtered_by = _visible(nodes, sources)
    return Found(
        "rocm",
        tuple(node.device for node in visible),
        present=len(nodes),
        driver=sources.text("/sys/module/amdgpu/version"),
        runtime=_runtime(sources) if nodes else None,
        filtered_by=filtered_by,
        notes=tuple(notes),
    )


def _folders(sources: Sources) -> list[Path]:
    try:
        folders = [p for p in sources.at(NODES).iterdir() if p.name.isdigit()]
    except OSError:
        return []
    return sorted(folders, key=lambda p: int(p.name))


def _properties(path: Path) -> dict[str, int]:
    """`name value` lines of a KFD properties file."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.strip().partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found


def _node(folder: Path, sources: Sources, notes: list[str]) -> _Node | None:
    try:
        properties = _properties(folder / "properties")
    except OSError:  # a container's device rules hide the GPU
        notes.append(f"GPU node {folder.name} can't be read: not given to this container or user")
        return None
    version = properties.get("gfx_target_version", 0)
    if not version:  # a CPU
        return None
    minor = properties.get("drm_render_minor", 0)
    if minor and not sources.at(f"/dev/dri/renderD{minor}").exists():
        notes.append(f"GPU node {folder.name} has no /dev/dri/renderD{minor} here: it is left out")
        return None
    arch = gfx_name(version)
    device = Device(arch, _name(properties, arch, sources), _memory(folder), _units(properties))
    return _Node(f"GPU-{properties.get('unique_id', 0):016x}", device)


def _name(properties: dict[str, int], arch: str, sources: Sources) -> str:
    minor = properties.get("drm_render_minor", 0)
    product = sources.text(f"/sys/class/drm/renderD{minor}/device/product_name")
    return product or PRODUCTS.get(properties.get("device_id", 0)) or f"AMD GPU ({arch})"


def _memory(folder: Path) -> int | None:
    total = 0
    for bank in sorted(folder.glob("mem_banks/*/properties")):
        try:
            properties = _properties(bank)
        except OSError:
            continue
        if properties.get("heap_type") in DEVICE_HEAPS:
            total += properties.get("size_in_bytes", 0)
    return total or None


def _units(properties: dict[str, int]) -> int | None:
    simds, per_unit = properties.get("simd_count", 0), properties.get("simd_per_cu", 0)
    return simds // per_unit if simds and per_unit else None


def _visible(nodes: list[_Node], sources: Sources) -> tuple[list[_Node], tuple[str, ...]]:
    """ROCr filters first; HIP then counts what is left. `CUDA_VISIBLE_DEVICES` is HIP's second name."""
    used = []
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        asked = first_set(sources.environ, *names)
        if asked is None:
            continue
        named = [(node.uuid, position) for position, node in enumerate(nodes)]
        chosen = [nodes[position] for position in choose(asked[1], range(len(nodes)), named)]
        if len(chosen) < len(nodes):
            used.append(asked[0])
        nodes = chosen
    return nodes, tuple(used)


def _runtime(sources: Sources) -> str | None:
    """Version of the ROCm installation; a wheel that brings its own libraries leaves none."""
    folder = sources.environ.get("ROCM_PATH") or "/opt/rocm"
    text = sources.text(f"{folder}/.info/version")
    return text.partition("-")[0] if text else None
