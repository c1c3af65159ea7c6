"""Decode steps under graphs, written directly on a library's own API by its own recipe for graphs.

FlashInfer: the wrapper with `use_cuda_graph=True` on buffers of its own, `plan()` before each replay. FA3:
`flash_attn_with_kvcache` on lengths and scheduler metadata that are updated in place. Both are given what an
engine would have to make first: page lists that lie on the device already, one set for each step.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.backends.cuda.flashinfer_plan import inner_backend, uses_tensor_cores
from anyattn.core.graph.objects import GraphPlatform
from anyattn.platforms.graphs import graph_platform
from benchmarks.direct.fa3 import library_of
from benchmarks.direct.recipe import NoRecipe, writer
from benchmarks.direct.stage import Stage

__all__ = ["GRAPHED", "Loop", "Steps", "graphs_of"]

_WORKSPACE = 256 << 20


def graphs_of(device: torch.device) -> GraphPlatform:
    """The device's graphs; on a CPU a recorder, one that knows Triton's launches in the interpreter."""
    if device.type != "cpu":
        return graph_platform(device)
    from anyattn.core.graph.recorder import RecorderPlatform

    if os.environ.get("TRITON_INTERPRET") != "1":
        return RecorderPlatform()
    from anyattn.kernels.triton.recording import recording_launches

    return RecorderPlatform(seams=[recording_launches])


class Steps:
    """Consecutive decode steps around a context: each is a token longer than the one before.

    Attributes:
        lens: int64 `[B]` KV tokens of each step; loc: int64 `[B]`, where its tokens' KV goes. Both on the
            host, pinned for a GPU. batches: made of these.
    """

    def __init__(self, stage: Stage, context: int, count: int) -> None:
        """`stage`: has room for `context + count` tokens of each request."""
        self.count, self._stage = count, stage
        rows = torch.arange(stage.shape.requests)
        first = context - count // 2 + 1
        self.lens = [self._pinned(torch.full_like(rows, first + i)) for i in range(count)]
        self.loc = [self._pinned(self._slots(first + i - 1)) for i in range(count)]
        self.batches = [
            anyattn.ForwardBatch.decode(self._pinned(rows), lens, loc)
            for lens, loc in zip(self.lens, self.loc, strict=True)
        ]

    def _slots(self, position: int) -> torch.Tensor:
        page = self._stage.page
        return self._stage.host_pages[:, position // page].long() * page + position % page

    def _pinned(self, x: torch.Tensor) -> torch.Tensor:
        return x.pin_memory() if self._stage.device.type == "cuda" else x

    def pages(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A page table in CSR form: int32 offsets and tokens of each last page on the host, page numbers on
        the device.
        """
        stage, length = self._stage, int(self.lens[number][0])
        count = -(-length // stage.page)
        offsets = torch.arange(stage.shape.requests + 1, dtype=torch.int32) * count
        last = torch.full((stage.shape.requests,), (length - 1) % stage.page + 1, dtype=torch.int32)
        return offsets, stage.pages[:, :count].flatten().contiguous(), last


@dataclass(frozen=True)
class Loop:
    """`step(number)` runs one of the steps, planning and copies included; `output()`: of its last layer."""

    name: str
    step: Callable[[int], None]
    output: Callable[[], torch.Tensor]


Attend = Callable[[int], torch.Tensor]
"""Attention of one of the pool's layers on the stage's queries."""


def _captured(
    stage: Stage, platform: GraphPlatform, layers: int, attend: Attend
) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """`(replay, output)` of `layers` layers, each with its KV write, over those of the pool in turn."""
    _, write = writer(stage)
    last: list[torch.Tensor] = []

    def run() -> None:
        for number in range(layers):
            layer = number % stage.shape.layers
            write(layer)
            out = attend(layer)
        last[:] = [out]

    run()
    platform.synchronize()
    graph = platform.new_graph()
    graph.capture(run)
    return graph.replay, lambda: last[0]


def flashinfer(stage: Stage, steps: Steps, platform: GraphPlatform, layers: int) -> Loop:
    """`BatchDecodeWithPagedKVCacheWrapper` in graph mode, with the inner kernel that the backend uses."""
    if stage.shape.mla:
        raise NoRecipe("latents under graphs aren't called directly here")
    import flashinfer as library  # type: ignore[import-not-found,unused-ignore]

    shape, pool, device = stage.shape, stage.pool, stage.device
    group = stage.layers[0].plan_group
    tensor_cores = uses_tensor_cores(group, shape.num_q, shape.dtype, pool.kv_dtype)
    inner = inner_backend(stage.decision.decode.row)
    tables = [steps.pages(i) for i in range(steps.count)]

    def buffer(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    wrapper: Any = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device), pool.layout,
        use_cuda_graph=True, use_tensor_cores=tensor_cores, backend=inner,
        paged_kv_indptr_buffer=buffer(shape.requests + 1),
        paged_kv_indices_buffer=buffer(stage.pages.numel()),
        paged_kv_last_page_len_buffer=buffer(shape.requests),
    )  # fmt: skip

    def plan(number: int) -> None:
        wrapper.plan(
            *tables[number], shape.num_q, shape.num_kv, shape.dim, stage.page,
            q_data_type=shape.dtype, kv_data_type=shape.dtype,
        )  # fmt: skip

    caches = [(pool.key_cache(i), pool.value_cache(i)) for i in range(shape.layers)]
    plan(0)
    replay, output = _captured(stage, platform, layers, lambda layer: wrapper.run(stage.q, caches[layer]))

    def step(number: int) -> None:
        stage.loc.copy_(steps.loc[number], non_blocking=True)
        plan(number)
        replay()

    kind = "tensor cores" if tensor_cores else "CUDA cores"
    return Loop(f"decode wrapper, use_cuda_graph ({inner}, {kind})", step, output)


def fa3(stage: Stage, steps: Steps, platform: GraphPlatform, layers: int) -> Loop:
    """`flash_attn_with_kvcache`; the build's scheduler runs before each replay, where it has one."""
    library, distribution = library_of(stage)
    shape, pool, attend = stage.shape, stage.pool, library.flash_attn_with_kvcache
    lens = [each.int() for each in steps.lens]
    if stage.device.type == "cuda":
        lens = [each.pin_memory() for each in lens]
    options: dict[str, Any] = {"cache_seqlens": stage.lens, "page_table": stage.pages, "causal": True}
    longest = stage.pages.shape[1] * stage.page

    def schedule() -> torch.Tensor:
        found: torch.Tensor = library.get_scheduler_metadata(
            shape.requests, 1, longest, shape.num_q, shape.num_kv, shape.dim, stage.lens,
            qkv_dtype=shape.dtype, page_size=stage.page, causal=True,
        )  # fmt: skip
        return found

    planned = hasattr(library, "get_scheduler_metadata")
    planned = planned and "scheduler_metadata" in inspect.signature(attend).parameters
    stage.lens.copy_(lens[0])
    kept = schedule().clone() if planned else torch.empty(0)
    if planned:
        options["scheduler_metadata"] = kept
    query = stage.q[:, None]
    caches = [(pool.key_cache(i), pool.value_cache(i)) for i in range(shape.layers)]
    replay, output = _captured(
        stage, platform, layers, lambda layer: attend(query, *caches[layer], **options)[:, 0]
    )

    def step(number: int) -> None:
        stage.lens.copy_(lens[number], non_blocking=True)
        stage.loc.copy_(steps.loc[number], non_blocking=True)
        if planned:
            kept.copy_(schedule())
        replay()

    return Loop(f"flash_attn_with_kvcache of {distribution}", step, output)


GRAPHED: Mapping[str, Callable[[Stage, Steps, GraphPlatform, int], Loop]] = {
    "flashinfer": flashinfer,
    "fa3": fa3,
}
"""Backend -> its library's own loop. The kernels of `triton` are nobody else's."""
