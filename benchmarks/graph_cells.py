"""Cells of `benchmarks.graph_step`, what was measured in one, and the limits that it is held to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyattn.errors import ConfigError
from benchmarks.direct import Shape

__all__ = ["FULL", "LIMITS", "QUICK", "STEPS", "Cell", "Measured", "table"]

BARE_LIMIT, BARE_FROM = 1.03, 16
HOST_LIMITS_US = {"triton": 60.0, "fa3": 60.0}
DIRECT_LIMIT = 1.02
STEPS = 16
"""Different steps; a sample runs each once."""
KV_BYTES, FEW_LAYERS = 100e9, 8
"""Where the KV of all layers would take more, the steps cycle over so many."""
QUICK = "1x1024,16x1024,64x8192,256x1024"
FULL = "1x1024,1x8192,16x1024,16x8192,64x1024,64x8192,256x1024,256x8192"


LIMITS = {
    "step_over_bare": BARE_LIMIT, "from_requests": BARE_FROM, "host_us": HOST_LIMITS_US,
    "step_over_direct": DIRECT_LIMIT,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """`requests` of about `context` tokens."""

    requests: int
    context: int

    @staticmethod
    def parse(text: str) -> list[Cell]:
        """Of `16x1024,64x8192`. Raises `ConfigError`."""
        found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in text.split(",")]
        if None in found:
            hint = "give cells as in --cells 16x1024,64x8192"
            raise ConfigError("a cell", asked=repr(text), allowed="REQUESTSxCONTEXT, both >= 1", hint=hint)
        return [Cell(*map(int, match.groups())) for match in found if match]

    def __str__(self) -> str:
        return f"{self.requests}x{self.context}"

    def shape(self, base: Shape) -> Shape:
        """The pool: all layers, or few where their KV would be too large."""
        length = self.context + STEPS
        width = 576 if base.mla else 2 * base.num_kv * base.dim
        nbytes = self.requests * length * width * base.dtype.itemsize * base.layers
        layers = min(base.layers, FEW_LAYERS) if nbytes > KV_BYTES else base.layers
        return replace(base, requests=self.requests, length=length, layers=layers)


@dataclass(frozen=True)
class Measured:
    """One backend in one cell. Times in us a step, medians of the rounds.

    Attributes:
        layers: of the pool. over_bare, over_direct: ratios. host_us: of the whole call, graph launch
            included, behind another call; host_cold_us: behind a wait; launch_us: of the launch alone.
        direct: the other loop, None without one. judged: measured on a GPU.
    """

    backend: str
    method: str
    requests: int
    context: int
    layers: int
    step_us: float
    bare_us: float
    over_bare: float
    host_us: float
    host_cold_us: float
    launch_us: float
    direct: str | None
    direct_us: float | None
    direct_host_us: float | None
    over_direct: float | None
    replays: int
    judged: bool

    @property
    def faults(self) -> tuple[str, ...]:
        """Limits that are exceeded."""
        found = []
        if self.requests >= BARE_FROM and self.over_bare > BARE_LIMIT:
            found.append(f"more than {BARE_LIMIT} x its kernels")
        if self.host_us > HOST_LIMITS_US.get(self.backend, float("inf")):
            found.append(f"more than {HOST_LIMITS_US[self.backend]:.0f} us on the host")
        if self.over_direct is not None and self.over_direct > DIRECT_LIMIT:
            found.append(f"more than {DIRECT_LIMIT} x direct")
        return tuple(found) if self.judged else ()

    def row(self) -> str:
        """A line of the Markdown table."""
        verdict = "; ".join(self.faults) or ("ok" if self.judged else "not judged")
        cells = [
            self.backend, f"{self.requests} x {self.context}", str(self.layers), f"{self.step_us:.1f}",
            f"{self.bare_us:.1f}", f"{self.over_bare:.3f}", _number(self.direct_us, 1),
            _number(self.over_direct, 3), f"{self.host_us:.1f}", f"{self.host_cold_us:.1f}",
            f"{self.launch_us:.1f}", _number(self.direct_host_us, 1), verdict,
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


_HEAD = (
    "| backend | B x context | layers of KV | step us | bare us | step/bare | direct us | step/direct "
    "| host us | behind a wait | of it launch | direct host us | verdict |"
)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(found: Iterable[Measured]) -> str:
    """Markdown."""
    return "\n".join([_HEAD, "|---" * 13 + "|", *(each.row() for each in found)])
