"""Steps of every kind that `ascend` runs, on the CPU: each a function that plans and attends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import anyattn
from anyattn.core.mla_layer import MLAProjections
from anyattn.core.spec import MLASpec
from anyattn.testing.selecting import select_for

PAGE, REQUESTS, CONTEXT = 128, 5, 1024
DENSE = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
LATENT = anyattn.AttentionSpec(
    num_q_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=0.07, mla=MLASpec()
)
MODES = ("decode", "extend", "mixed", "fresh", "verify")
LENGTHS = {
    "decode": ([0, 127, 128, 300, 699], [1] * 5),
    "fresh": ([0] * 5, [3, 150, 1, 128, 40]),
    "verify": ([1, 128, 257, 600, 90], [4] * 5),
    "mixed": ([0, 300, 17, 333, 400], [200, 33, 1, 1, 1]),
    "extend": ([0, 128, 127, 300, 55], [70, 3, 0, 150, 16]),
}
"""Cached and new tokens of each request, by mode."""


@dataclass
class World:
    """A backend with a filled pool, and one layer."""

    backend: Any
    pool: Any
    table: anyattn.kv.RequestTable
    layer: anyattn.AttentionLayer
    spec: anyattn.AttentionSpec
    dtype: torch.dtype
    slots: list[torch.Tensor]

    def batch(self, mode: str) -> anyattn.ForwardBatch:
        """The mode's batch. Fills the request table and the cached KV, the same each time."""
        prefix, new = LENGTHS[mode]
        torch.manual_seed(1)
        for row, (cached, count) in enumerate(zip(prefix, new, strict=True)):
            self.table.req_to_token[row, : cached + count] = self.slots[row][: cached + count].int()
            k = torch.randn(cached, self.spec.num_kv_heads, self.spec.head_dim).to(self.dtype)
            v = torch.randn(cached, self.spec.num_kv_heads, self.spec.v_head_dim).to(self.dtype)
            self.pool.write(0, self.slots[row][:cached], k, v)
        parts = zip(self.slots, prefix, new, strict=True)
        loc, rows = torch.cat([s[p : p + e] for s, p, e in parts]), list(range(REQUESTS))
        if mode == "decode":
            return anyattn.ForwardBatch.decode(rows, [p + 1 for p in prefix], loc)
        if mode == "mixed":
            return anyattn.ForwardBatch.mixed(rows, prefix, new, loc)
        if mode == "verify":
            return anyattn.ForwardBatch.verify(rows, prefix, new, loc)
        return anyattn.ForwardBatch.extend(rows, prefix, new, loc)

    def inputs(
        self, tokens: int, *, materialised: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, k and v of a step."""
        torch.manual_seed(2)
        spec, mla = self.spec, self.spec.mla
        size = spec.head_dim
        if materialised:
            assert mla is not None
            size = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        q = torch.randn(tokens, spec.num_q_heads, size).to(self.dtype)
        k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim).to(self.dtype)
        v = None if mla else torch.randn(tokens, spec.num_kv_heads, spec.v_head_dim).to(self.dtype)
        return q, k, v

    def attend(self, mode: str, **options: Any) -> tuple[Any, Any]:
        """`(result, plan)` of one eager step."""
        batch = self.batch(mode)
        plan = self.backend.init_forward_metadata(batch)
        method = plan.mla_method
        q, k, v = self.inputs(batch.num_tokens, materialised=method is not None and method.expands)
        with anyattn.forward_context(self.backend, plan):
            return self.layer(q, k, v, batch, **options), plan


def world(
    spec: anyattn.AttentionSpec = DENSE,
    host: str = "ascend:910b",
    dtype: torch.dtype = torch.float16,
    *,
    backend: str = "ascend",
    layout: str | None = None,
    drafts: int = 8,
    pages: int = 40,
) -> World:
    """A backend on the CPU, decided for `host`; the same seeds give the same pool."""
    limits = anyattn.Limits(
        max_requests=8, max_tokens=1024, max_context=CONTEXT, max_draft_tokens=0 if "310" in host else drafts
    )
    decision = select_for(
        [spec],
        device="cpu",
        host=host,
        dtype=dtype,
        backend=backend,
        page_size=PAGE,
        layout=layout,
        limits=limits,
    )
    pool = anyattn.kv.create_pool(decision, num_slots=PAGE * pages)
    table = anyattn.kv.RequestTable(max_requests=8, max_context=CONTEXT, device="cpu")
    torch.manual_seed(0)
    expand, mla, heads = None, spec.mla, spec.num_q_heads
    if mla is not None:
        w_k, w_v = (
            (torch.randn(heads, size, mla.kv_lora_rank) * 0.05).to(dtype)
            for size in (mla.qk_nope_head_dim, mla.v_head_dim)
        )
        expand = MLAProjections(w_k, w_v)
    sinks = torch.randn(heads) if spec.sinks else None
    numbers = random.Random(0).sample(range(1, 41), 40)
    slots = [
        torch.cat([torch.arange(p * PAGE, (p + 1) * PAGE) for p in numbers[row * 8 : row * 8 + 8]])
        for row in range(REQUESTS)
    ]
    layer = anyattn.AttentionLayer(spec, 0, sinks, mla_expand=expand)
    return World(anyattn.create_backend(decision, pool, table), pool, table, layer, spec, dtype, slots)


def steps() -> Iterator[Callable[[], Any]]:
    """Every kind of step on every chip, to be called with a torch_npu in place."""
    bf16 = torch.bfloat16
    kinds: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, True),
        ({"layout": "HND"}, True),
        ({"spec": replace(DENSE, sliding_window=50)}, True),
        ({"spec": replace(DENSE, sinks=True), "dtype": bf16}, False),
        ({"spec": LATENT, "dtype": bf16, "host": "ascend:910c"}, True),
        ({"spec": LATENT, "dtype": bf16, "layout": "NZ"}, True),
        ({"host": "ascend:310p"}, False),
    )
    for options, lse in kinds:
        for mode in MODES:
            if not (mode == "verify" and "host" in options and "310p" in options["host"]):
                yield partial(_step, options, mode, lse)


def _step(options: dict[str, Any], mode: str, lse: bool) -> Any:
    return world(**options).attend(mode, return_lse=lse)
