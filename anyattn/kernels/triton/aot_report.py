"""One compiled configuration as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from anyattn.kernels.triton.aot_usage import Usage

__all__ = ["Report"]


@dataclass
class Report:
    """What came of one entry on one target.

    Attributes:
        constexprs, options, signature: what identifies the compiled kernel.
        usage: None where nothing was compiled. `seconds`: time of the compilation.
        problems: why this can't ship. `notes`: what was accepted, with its reason.
    """

    entry: str
    kernel: str
    target: str
    shared_limit: int
    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    signature: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    usage: Usage | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain types only."""
        data = asdict(self)
        data["signature"] = {name: str(kind) for name, kind in self.signature.items()}
        data["ok"] = not self.problems
        return data
