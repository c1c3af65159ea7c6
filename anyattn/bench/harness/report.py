"""Results: medians with spread, rates against the machine's limits, JSON and a table."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyattn.bench.harness.candidate import Work
from anyattn.bench.harness.limits import MachineLimits

__all__ = ["SCHEMA", "Ratio", "Report", "Result", "device_name", "versions"]

SCHEMA = 1
_LIBRARIES = ("triton", "transformers", "flashinfer-python", "amd-aiter", "numpy")


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Result:
    """Samples of one candidate: seconds per call, in the order of the rounds."""

    name: str
    seconds: tuple[float, ...]
    calls: int
    work: Work

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range in percent of the median."""
        low, high = _quartiles(self.seconds)
        return 100.0 * (high - low) / self.median

    def to_json(self, limits: MachineLimits | None) -> dict[str, Any]:
        """Plain values; rates only where the work says so, fractions only where limits were measured."""
        found: dict[str, Any] = {
            "name": self.name,
            "median_s": self.median,
            "iqr_percent": self.spread,
            "best_s": min(self.seconds),
            "calls_per_sample": self.calls,
            "samples_s": list(self.seconds),
        }
        if self.work.bytes:
            found["gb_per_s"] = self.work.bytes / self.median / 1e9
            if limits is not None:
                found["of_copy_bandwidth"] = found["gb_per_s"] / limits.copy_gb_per_s
        if self.work.flops:
            found["tflop_per_s"] = self.work.flops / self.median / 1e12
            if limits is not None:
                found["of_gemm"] = found["tflop_per_s"] / limits.gemm_tflop_per_s
        if self.work.items:
            found["items_per_s"] = self.work.items / self.median
            found["item"] = self.work.item
        return found


@dataclass(frozen=True)
class Ratio:
    """How many times as long one candidate takes as another, round by round: median and quartiles."""

    median: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """True if the middle half of the rounds agrees on who is faster."""
        return self.low > 1.0 or self.high < 1.0


@dataclass(frozen=True)
class Report:
    """One measurement. `load`: the machine's load average before and after."""

    title: str
    device: str
    versions: dict[str, str]
    threads: int
    load: tuple[float, float]
    graph: bool
    limits: MachineLimits | None
    results: tuple[Result, ...]

    def result(self, name: str) -> Result:
        """The result of a candidate. Raises `KeyError` for an unknown name."""
        found = {r.name: r for r in self.results}
        return found[name]

    def ratio(self, slower: str, faster: str) -> Ratio:
        """Time of `slower` over time of `faster`, paired by round."""
        pairs = zip(self.result(slower).seconds, self.result(faster).seconds, strict=True)
        values = [a / b for a, b in pairs]
        return Ratio(statistics.median(values), *_quartiles(values))

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "device": self.device,
            "versions": self.versions,
            "threads": self.threads,
            "load": list(self.load),
            "graph": self.graph,
            "limits": None if self.limits is None else asdict(self.limits),
            "results": [r.to_json(self.limits) for r in self.results],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """For a reader: machine and limits, then a row per candidate."""
        head = [
            f"{self.title} on {self.device}, {self.threads} threads, torch {self.versions['torch']}"
            + (", graph replay" if self.graph else ""),
            f"load average {self.load[0]:.2f} before, {self.load[1]:.2f} after",
        ]
        if self.limits is not None:
            head.append(
                f"limits: copy {self.limits.copy_gb_per_s:.1f} GB/s, read {self.limits.read_gb_per_s:.1f} "
                f"GB/s, {self.limits.dtype} product {self.limits.gemm_tflop_per_s:.3f} TFLOP/s"
            )
        rows = [["candidate", "median", "spread", "rates", f"x {self.results[0].name}"]]
        rows += [self._row(r) for r in self.results]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*head, *lines])

    def _row(self, result: Result) -> list[str]:
        relative = self.ratio(result.name, self.results[0].name).median
        rates = ", ".join(_rates(result.to_json(self.limits)))
        return [result.name, _time(result.median), f"{result.spread:.1f}%", rates, f"{relative:.3f}"]


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def _rates(found: dict[str, Any]) -> list[str]:
    parts = []
    if "items_per_s" in found:
        parts.append(f"{found['items_per_s']:.1f} {found['item']}/s")
    for key, unit, share in (
        ("gb_per_s", "GB/s", "of_copy_bandwidth"),
        ("tflop_per_s", "TFLOP/s", "of_gemm"),
    ):
        if key in found:
            of = f" ({100 * found[share]:.0f}%)" if share in found else ""
            parts.append(f"{found[key]:.3g} {unit}{of}")
    return parts


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python, torch, its CUDA, and the libraries that timings usually depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("anyattn", *_LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
