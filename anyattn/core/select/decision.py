"""Verdicts and the decision record: plain data, JSON both ways."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from anyattn.core.capabilities import Phase

if TYPE_CHECKING:
    from anyattn.core.facts import HostFacts
    from anyattn.core.select.request import Request

__all__ = ["SCHEMA", "Accepted", "Candidate", "Decision", "Degraded", "KVChoice", "PhaseChoice", "Reason",
           "ReasonCode", "Rejected", "Verdict"]  # fmt: skip

SCHEMA = 1


class ReasonCode(Enum):
    """Why a candidate was rejected or degraded."""

    PHASE = "phase"
    MODEL_KIND = "model_kind"
    ARCHITECTURE = "architecture"
    LIBRARY_MISSING = "library_missing"
    LIBRARY_VERSION = "library_version"
    LIBRARY_BROKEN = "library_broken"
    LIBRARY_SHADOWED = "library_shadowed"  # another distribution owns the module
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
