"""Stand-in for FlashInfer 0.7 (`flashinfer-python`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from anyattn.testing.emulators.modules import module_tree

__all__ = ["modules"]


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules of the library."""
    return module_tree({"flashinfer": {"__version__": "0.7.2.post1"}})
