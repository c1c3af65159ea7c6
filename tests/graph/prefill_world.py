"""A small model with weights, whose prefill steps run in segments or as they are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

import anyattn
from anyattn.core.graph.token_buckets import TokenBuckets

__all__ = ["BUCKETS", "CONTEXT", "HEADS", "SIZE", "Model", "World"]

HEADS, SIZE, WIDTH, PAGE, CONTEXT = (4, 2), 16, 24, 4, 64
BUCKETS = TokenBuckets([8, 16, 32])


class Model(nn.Module):
    """Layers that mix rows by attention alone, with a residual that lives across all segments."""

    def __init__(self, spec: anyattn.AttentionSpec, layers: int, *, flat: bool = True) -> None:
        super().__init__()
        size = spec.head_dim
        rows = (HEADS[0] * size, HEADS[1] * size, HEADS[1] * size)
        self.rows, self.size, self.flat = rows, size, flat
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, sum(rows)) for _ in range(layers))
        self.attention = nn.ModuleList(anyattn.AttentionLayer(spec, i) for i in range(layers))
        self.back = nn.ModuleList(nn.Linear(rows[0], WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor, batch: anyattn.ForwardBatch) -> torch.Tensor:
        first = None
        for project, attention, back in zip(self.qkv, self.attention, self.back, strict=True):
            q, k, v = project(x).split(self.rows, dim=1)
            if not self.flat:
                q, k, v = (t.unflatten(1, (-1, self.size)) for t in (q, k, v))
            out = attention(q, k, v, batch).flatten(1)
            first = out if first is None else first  # an attention output that later segments read
            x = x + torch.tanh(back(out) + first.mean(1, keepdim=True))
        return x


class World:
    """A backend, a model on it, and batches of any lengths at shuffled slots."""

    def __init__(
        self,
        *,
        backend: str = "torch_native",
        layers: int = 2,
        requests: int = 4,
        size: int = SIZE,
        page: int = PAGE,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        **spec: object,
    ) -> None:
        torch.manual_seed(0)
        made = anyattn.AttentionSpec(num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=size, **spec)
        self.limits = anyattn.Limits(
            max_requests=requests, max_tokens=BUCKETS.largest, max_context=CONTEXT, max_draft_tokens=4
        )
        decision = anyattn.select(
            [made] * layers,
            dtype=dtype,
            device=device,
            backend=backend,
            page_size=page,
            limits=self.limits,
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=requests * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=requests, max_context=CONTEXT, device=device)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.model = Model(made, layers).to(device, dtype)
        pages = torch.randperm(requests * CONTEXT // page) + 1
        slots = (pages[:, None] * page + torch.arange(page)).reshape(requests, CONTEXT).int()
        self.table.req_to_token[:requests] = slots.to(device)
        for layer in range(layers):
            for cache in self.pool.caches(layer):
                cache.normal_()
        self.x = torch.zeros(BUCKETS.largest, WIDTH, device=device, dtype=dtype)

    def body(self, batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, batch)

    def slots(self, rows: Sequence[int], prefix: Sequence[int], new: Sequence[int]) -> list[int]:
        """Where the new tokens of each request lie."""
        spans = zip(rows, prefix, new, strict=True)
        return [int(s) for r, p, n in spans for s in self.table.req_to_token[r, p : p + n]]

    def extend(self, new: Sequence[int], **options: object) -> tuple[anyattn.ForwardBatch, torch.Tensor]:
        """A step of `new` tokens a request, on prefixes of any length, with its inputs."""
        rows = random.sample(range(self.limits.max_requests), len(new))
        prefix = [random.randint(0, CONTEXT - n) for n in new]
        batch = anyattn.ForwardBatch.extend(rows, prefix, new, self.slots(rows, prefix, new), **options)
        return batch, torch.randn(sum(new), WIDTH).to(self.x)

    @torch.no_grad()
    def eager(self, batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        with anyattn.forward_context(self.backend, self.backend.init_forward_metadata(batch)):
            return self.body(batch, x)
