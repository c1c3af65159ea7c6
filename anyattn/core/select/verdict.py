"""Verdicts on a candidate: accepted, degraded or rejected, with reasons. JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from anyattn.core.select.codec import from_plain, to_plain

__all__ = ["Accepted", "Degraded", "Reason", "ReasonCode", "Rejected", "Verdict", "verdict_from_json",
           "verdict_to_json"]  # fmt: skip


class ReasonCode(Enum):
    """Why a candidate was rejected or degraded."""

    PHASE = "phase"
    MODEL_KIND = "model_kind"
    ARCHITECTURE = "architecture"
    LIBRARY_MISSING = "library_missing"
    LIBRARY_VERSION = "library_version"
    LIBRARY_BROKEN = "library_broken"
    LIBRARY_SHADOWED = "library_shadowed"  # another distribution owns the module
    LIBRARY_BLOCKED = "library_blocked"  # it can't compile its kernels here
    RUNTIME_VERSION = "runtime_version"
    HEAD_DIM = "head_dim"
    HEAD_COUNT = "head_count"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    PAGE_SIZE = "page_size"
    LAYOUT = "layout"
    FEATURE = "feature"
    DETERMINISM = "determinism"
    NOT_BUILT = "not_built"
    PLUGIN_BROKEN = "plugin_broken"  # an installed plugin that can't be used
    NO_JOINT_LAYOUT = "no_joint_layout"
    EXPLICIT_OTHER = "explicit_other"
    DEGRADED = "degraded"


@dataclass(frozen=True)
class Reason:
    """What was asked, what is allowed, what to do about it."""

    code: ReasonCode
    asked: str
    allowed: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.code.value}: asked {self.asked}, allowed {self.allowed}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True)
class Accepted:
    """The row passes."""

    kind = "accepted"


@dataclass(frozen=True)
class Degraded:
    """The row passes, and is second-rate for a stated reason."""

    reason: Reason
    kind = "degraded"


@dataclass(frozen=True)
class Rejected:
    """No row passes; the reasons of the nearest one."""

    reasons: tuple[Reason, ...]
    kind = "rejected"


Verdict = Accepted | Degraded | Rejected


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Its kind as `verdict`, and `reasons`."""
    reasons: tuple[Reason, ...] = ()
    if isinstance(verdict, Degraded):
        reasons = (verdict.reason,)
    elif isinstance(verdict, Rejected):
        reasons = verdict.reasons
    return {"verdict": verdict.kind, "reasons": to_plain(reasons)}


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """The verdict that `verdict_to_json` wrote."""
    reasons = from_plain(tuple[Reason, ...], data["reasons"])
    if data["verdict"] == Accepted.kind:
        return Accepted()
    return Degraded(reasons[0]) if data["verdict"] == Degraded.kind else Rejected(reasons)
