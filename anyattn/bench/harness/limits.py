"""What the machine can do, measured in the run that is judged by it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from anyattn.bench.harness.candidate import Candidate, cache_bytes
from anyattn.bench.harness.timers import CudaTimer, Timer, make_timer

__all__ = ["MachineLimits", "measure_limits"]

_SAMPLES = 5
_ROW = 8


@dataclass(frozen=True)
class MachineLimits:
    """Best of a few samples. 1 GB/s = 1e9 B/s, 1 TFLOP/s = 1e12 FLOP/s.

    Attributes:
        copy_gb_per_s: `dst.copy_(src)` far outside the cache, bytes read plus bytes written.
        read_gb_per_s: a sum over the same; on a GPU, the faster of torch's and a Triton kernel's.
        gemm_tflop_per_s: a square matrix product in `dtype`.
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    gemm_tflop_per_s: float
    dtype: str


def measure_limits(
    device: torch.device | str, dtype: torch.dtype = torch.float32, *, megabytes: int = 0, size: int = 0
) -> MachineLimits:
    """Measure bandwidths on `megabytes` (default: eight caches) and a `size`-cubed product.

    The first copy and product are warm-up.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    timer = make_timer(device)
    num_bytes = megabytes * 2**20 or max(8 * cache_bytes(device), 2**31 if on_gpu else 2**28)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _best(timer, Candidate("copy", [lambda: target.copy_(source)]))
    read = min(_best(timer, Candidate(name, [run])) for name, run in _readers(source).items())
    size = size or (8192 if on_gpu else 1536)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    gemm = _best(timer, Candidate("gemm", [lambda: torch.nn.functional.linear(a, b)]))
    return MachineLimits(
        copy_gb_per_s=2 * source.nbytes / copy / 1e9,
        read_gb_per_s=source.nbytes / read / 1e9,
        gemm_tflop_per_s=2 * size**3 / gemm / 1e12,
        dtype=str(dtype).removeprefix("torch."),
    )


def _readers(source: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read all of it."""
    found: dict[str, Callable[[], object]] = {"torch": source.sum}
    if source.is_cuda and importlib.util.find_spec("triton") is not None:
        from anyattn.bench.harness.read import reader

        found["triton"] = reader(source)
    return found


def _best(timer: Timer, candidate: Candidate) -> float:
    """On a GPU several calls in a row: what the host takes for the first launch would count as theirs."""
    calls = _ROW if isinstance(timer, CudaTimer) else 1
    timer.sample(candidate, calls)
    return min(timer.sample(candidate, calls) for _ in range(_SAMPLES))
