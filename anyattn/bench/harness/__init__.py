"""One way to time anything here: named candidates, interleaved, with spread and the machine's own limits.

from anyattn.bench.harness import Candidate, Settings, Work, measure

report = measure("norm", [Candidate("torch", [lambda: norm(x)], Work(bytes=2 * x.nbytes))], "cpu")
print(report.table())
report.save("norm.json")
"""

from __future__ import annotations

from anyattn.bench.harness.candidate import Candidate, Work, cache_bytes, rotations
from anyattn.bench.harness.command import add_arguments, emit, settings_of
from anyattn.bench.harness.limits import MachineLimits, measure_limits
from anyattn.bench.harness.measure import Settings, measure
from anyattn.bench.harness.report import Ratio, Report, Result
from anyattn.bench.harness.timers import CpuTimer, CudaTimer, Timer, make_timer

__all__ = [
    "Candidate",
    "CpuTimer",
    "CudaTimer",
    "MachineLimits",
    "Ratio",
    "Report",
    "Result",
    "Settings",
    "Timer",
    "Work",
    "add_arguments",
    "cache_bytes",
    "emit",
    "make_timer",
    "measure",
    "measure_limits",
    "rotations",
    "settings_of",
]
