"""Platforms: what differs between vendors besides kernels. Preference lists are data; nothing imports torch.

Verify and draft have no lists of their own: selection reads prefill's for verify and decode's for draft.
Sparse and recurrent layers have none either: one backend serves one kind of layer. Vendors' packages bring
records of their own (`anyattn.detect.plugins`), which pass through the same door as these.
"""

from __future__ import annotations

from anyattn.core.capabilities import Preference
from anyattn.core.platform_record import PlatformRecord
from anyattn.errors import UnknownNameError
from anyattn.platforms import ascend, cpu, cuda, rocm

__all__ = ["PLATFORMS", "preferences", "records"]

_RECORDS = (
    PlatformRecord(name="cuda", summary="NVIDIA GPUs", device="cuda", preferences=cuda.PREFERENCES),
    PlatformRecord(name="rocm", summary="AMD GPUs", device="cuda", preferences=rocm.PREFERENCES),
    PlatformRecord(name="ascend", summary="Ascend NPUs", device="npu", preferences=ascend.PREFERENCES),
    PlatformRecord(name="cpu", summary="x86 and Arm CPUs", device="cpu", preferences=cpu.PREFERENCES),
)

PLATFORMS = tuple(record.name for record in _RECORDS)
"""Names of the built-in platforms."""


def records() -> tuple[PlatformRecord, ...]:
    """All built-in platforms."""
    return _RECORDS


def preferences(platform: str) -> tuple[Preference, ...]:
    """The preference lists of a built-in platform (`cuda`, `rocm`, `ascend`, `cpu`).

    Raises:
        UnknownNameError: another name.
    """
    for record in _RECORDS:
        if record.name == platform:
            return record.preferences
    raise UnknownNameError("platform", platform, PLATFORMS)
