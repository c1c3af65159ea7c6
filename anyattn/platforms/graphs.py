"""The graph objects of each kind of device."""

from __future__ import annotations

import torch

from anyattn.core.graph.objects import GraphPlatform
from anyattn.errors import GraphError

__all__ = ["graph_platform"]


def graph_platform(device: torch.device | str) -> GraphPlatform:
    """CUDA graphs on CUDA and ROCm devices, NPU graphs on Ascend; the recorder on a CPU, which shows the
    protocol and no speed.

    Raises:
        GraphError: a device without graph objects here.
    """
    kind = str(device).partition(":")[0]  # torch knows `npu` only where torch-npu is loaded
    if kind == "cuda":
        from anyattn.platforms.cuda_graphs import CUDAGraphPlatform

        return CUDAGraphPlatform(device)
    if kind == "npu":
        from anyattn.platforms.ascend_graphs import AscendGraphPlatform

        return AscendGraphPlatform()
    if kind == "cpu":
        return _recorder()
    raise GraphError(
        f"no graph objects for {kind}",
        asked=kind,
        allowed="cuda (CUDA and ROCm), npu, cpu",
        hint="run eagerly, or pass a GraphPlatform of your own to GraphRunner",
    )


def _recorder() -> GraphPlatform:
    from anyattn.core.graph.recorder import RecorderPlatform

    return RecorderPlatform()
