"""Platforms: what differs between vendors besides kernels. Preference lists are data; nothing imports torch.

Verify and draft have no lists of their own: selection reads prefill's for verify and decode's for draft.
Sparse and recurrent layers have none either: one backend serves one kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyattn.core.capabilities import Preference
from anyattn.errors import UnknownNameError
from anyattn.platforms import ascend, cpu, cuda, rocm

__all__ = ["PLATFORMS", "preferences"]

_PREFERENCES: Mapping[str, tuple[Preference, ...]] = {
    "cuda": cuda.PREFERENCES,
    "rocm": rocm.PREFERENCES,
    "ascend": ascend.PREFERENCES,
    "cpu": cpu.PREFERENCES,
}

PLATFORMS = tuple(_PREFERENCES)


def preferences(platform: str) -> tuple[Preference, ...]:
    """The preference lists of a platform (`cuda`, `rocm`, `ascend`, `cpu`).

    Raises:
        UnknownNameError: another name.
    """
    if platform not in _PREFERENCES:
        raise UnknownNameError("platform", platform, PLATFORMS)
    return _PREFERENCES[platform]
