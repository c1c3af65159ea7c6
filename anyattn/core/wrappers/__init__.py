"""Backends made of backends: each computes its traits from its children."""

from anyattn.core.wrappers.hybrid import HybridBackend

__all__ = ["HybridBackend"]
