"""Launches and copies of a call, counted in torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["count_launches", "kind_of"]

_HOST = {
    "cudaGraphLaunch": "graph launches",
    "cudaMemcpyAsync": "copies started",
    "cudaMemcpy": "copies started",
    "cudaMemsetAsync": "fills started",
    "cudaStreamSynchronize": "host waits",
    "cudaDeviceSynchronize": "host waits",
}


def kind_of(name: str, on_device: bool) -> str | None:
    """How an event of the profiler is counted; None for one that isn't: host calls that launch nothing."""
    if not on_device:
        launches = name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
        return "kernels launched" if launches else _HOST.get(name)
    for part, kind in (("HtoD", "copies to the device"), ("DtoH", "copies to the host")):
        if part in name:
            return kind
    if name.startswith("Memcpy"):
        return "copies on the device"
    return "fills on the device" if name.startswith("Memset") else "kernels"


def _counted(events: Iterable[tuple[str, bool]], calls: int) -> dict[str, float]:
    counts = Counter(kind_of(name, on_device) for name, on_device in events)
    return {kind: count / calls for kind, count in sorted(counts.items(), key=str) if kind is not None}


def count_launches(
    call: Callable[[int], object], numbers: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Events a call by kind: what the host starts, and what runs on the device (a graph's nodes too)."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    call(numbers[0])
    if on_gpu:
        torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiled:
        for number in numbers:
            call(number)
    events = [(e.name, str(e.device_type).endswith("CUDA")) for e in profiled.events() or []]
    return _counted(events, len(numbers))
