"""What a decision says of a measured table that it looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TableUse"]


@dataclass(frozen=True)
class TableUse:
    """A table of this architecture that was looked at: where it comes from, and if not used, why."""

    table: str
    device: str
    arch: str
    versions: Mapping[str, str]
    date: str
    commit: str
    command: str
    used: bool
    reason: str = ""
