"""What every emulator needs: module objects that look imported, the emulated chip, and its own error."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from anyattn.errors import AnyattnError

__all__ = ["EmulationError", "current_host", "module_tree", "set_host"]


class EmulationError(AnyattnError):
    """A call that the library takes in some way that its stand-in doesn't know."""


_host: list[str | None] = [None]


def current_host() -> str | None:
    """The simulated host whose library stands in now, such as `cuda:sm90`; None outside of emulation."""
    return _host[0]


def set_host(host: str | None) -> None:
    """Say which chip the modules made from now on, and their functions, behave like."""
    _host[0] = host


def module_tree(names: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Modules by dotted name, with the given attributes; parents are made and hold their children."""
    found: dict[str, ModuleType] = {}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in found:
                found[path] = _module(path)
    for name, module in found.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(found[parent], own, module)
        for attribute, value in names.get(name, {}).items():
            setattr(module, attribute, value)
    return found


def _module(name: str) -> ModuleType:
    module = ModuleType(name, "Stand-in of anyattn.testing.emulators.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)  # `find_spec` asks for one
    module.__path__ = []
    module.__file__ = f"<emulated {name}>"
    return module
