"""One decode step on a pool of several layers, for anyattn and for the library that is called directly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.core.select.decision import Decision
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.errors import SelectionError
from anyattn.testing.selecting import select_for

__all__ = ["Shape", "Stage"]

STEPS = 4
"""Different steps (lengths) that preparation is timed with: nothing may be kept from one to the next."""


@dataclass(frozen=True)
class Shape:
    """`requests` of `length` tokens in `layers` equal layers; `mla`: DeepSeek's latents, `num_q` heads."""

    requests: int = 8
    length: int = 64
    layers: int = 32
    num_q: int = 32
    num_kv: int = 8
    dim: int = 128
    mla: bool = False
    dtype: torch.dtype = torch.bfloat16

    def spec(self) -> anyattn.AttentionSpec:
        """One layer."""
        if not self.mla:
            return anyattn.AttentionSpec(num_q_heads=self.num_q, num_kv_heads=self.num_kv, head_dim=self.dim)
        return anyattn.AttentionSpec(
            num_q_heads=self.num_q, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5,
            mla=anyattn.MLASpec(),
        )  # fmt: skip

    def __str__(self) -> str:
        heads = f"MLA, {self.num_q} heads" if self.mla else f"{self.num_q}/{self.num_kv} heads, D {self.dim}"
        return f"{self.requests} x {self.length} tokens, {heads}, {self.layers} layers"


class Stage:
    """A backend chosen by name, a pool filled with noise, and a decode step.

    Attributes:
        q, k, v: `[B, H, D]` of the step's tokens (v None for latents). loc: int64 `[B]`, their slots.
        pages: int32 `[B, M]` page numbers in any order. lens: int32 `[B]` KV tokens of each request.
        batches: `STEPS` decode steps of different lengths, all arrays on the host (pinned for a GPU).
        host_lens: their lengths.
    """

    def __init__(self, backend: str, shape: Shape, device: torch.device, *, host: str | None = None) -> None:
        """`host`: decided for that machine, with tensors on `device` (emulated libraries)."""
        self.shape, self.device = shape, device
        limits = anyattn.Limits(shape.requests, shape.requests, shape.length + 64)
        self.decision = _select(backend, shape, device, host, limits)
        self.page = page = self.decision.kv.page_size
        rows, per_request = shape.requests, -(-shape.length // page)
        self.pool: Any = anyattn.kv.create_pool(self.decision, num_slots=rows * per_request * page)
        for layer in range(shape.layers):
            for cache in self.pool.caches(layer):
                cache.normal_()
        self.table = anyattn.kv.RequestTable(max_requests=rows, max_context=per_request * page, device=device)
        generator = torch.Generator().manual_seed(0)
        order = (torch.randperm(rows * per_request, generator=generator) + 1).view(rows, per_request)
        self.host_pages = order.int()
        self.pages = self.host_pages.to(device)
        slots = (order[:, :, None] * page + torch.arange(page)).view(rows, -1)
        self.table.req_to_token[:rows] = slots.to(self.table.req_to_token)
        built = anyattn.create_backend(self.decision, self.pool, self.table)
        self.backend = built.decode if isinstance(built, HybridBackend) else built
        spec = shape.spec()
        self.layers = [anyattn.AttentionLayer(spec, i) for i in range(shape.layers)]

        def noise(heads: int, size: int) -> torch.Tensor:
            return torch.randn(rows, heads, size, dtype=shape.dtype, device=device)

        self.q, self.k = noise(shape.num_q, spec.head_dim), noise(spec.num_kv_heads, spec.head_dim)
        self.v = None if shape.mla else noise(spec.num_kv_heads, spec.v_head_dim)
        self.host_lens = [self._lengths(step) for step in range(STEPS)]
        self.batches = [self._batch(slots, lens) for lens in self.host_lens]
        self.lens = self.host_lens[0].int().to(device)
        loc = self.batches[0].out_cache_loc
        assert loc is not None
        self.loc = loc.to(device)

    def _lengths(self, step: int) -> torch.Tensor:
        """int64 `[B]`; the first step's are all the same, the others' spread over half of it."""
        full = torch.full((self.shape.requests,), self.shape.length, dtype=torch.int64)
        least = max(1, self.shape.length // 2)
        spread = (torch.arange(self.shape.requests) + 1) * (step * 7) % (self.shape.length - least + 1)
        return full - spread

    def _batch(self, slots: torch.Tensor, lens: torch.Tensor) -> anyattn.ForwardBatch:
        rows = torch.arange(self.shape.requests)
        given = [rows, lens, slots[rows, lens - 1]]
        if self.device.type == "cuda":
            given = [each.pin_memory() for each in given]
        return anyattn.ForwardBatch.decode(*given)

    def indptr(self, step: int) -> torch.Tensor:
        """int32 `[B + 1]` on the host: offsets of a page table in CSR form."""
        counts = -(-self.host_lens[step] // self.page)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    def indices(self, step: int) -> torch.Tensor:
        """int32 page numbers in CSR form, on the device."""
        counts = (-(-self.host_lens[step] // self.page)).tolist()
        rows = zip(self.host_pages, counts, strict=True)
        return torch.cat([row[:count] for row, count in rows]).to(self.device)


def _select(
    backend: str, shape: Shape, device: torch.device, host: str | None, limits: anyattn.Limits
) -> Decision:
    """`backend` for everything, or for decode alone where it has no prefill."""

    def ask(**names: str) -> Decision:
        specs = [shape.spec()] * shape.layers
        return select_for(specs, device=str(device), host=host, dtype=shape.dtype, limits=limits, **names)

    try:
        return ask(backend=backend)
    except SelectionError as refused:
        try:
            return ask(decode=backend, prefill="torch_native")
        except SelectionError:
            raise refused from None
