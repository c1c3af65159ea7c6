"""Backends made of backends: each computes its traits from its children."""

from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.core.wrappers.shape_router import ShapeRouter

__all__ = ["HybridBackend", "ShapeRouter"]
