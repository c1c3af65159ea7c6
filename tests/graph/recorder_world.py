"""A served model of two layers, whose decode step a graph may record."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import anyattn

__all__ = ["HEADS", "SIZE", "Served"]

HEADS, SIZE = (4, 2), 16


class Served:
    """Backend, pool, table and address-stable inputs for decode steps of `requests` requests."""

    def __init__(self, requests: int = 3, *, backend: str = "torch_native", context: int = 24) -> None:
        specs = [anyattn.AttentionSpec(num_q_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=SIZE)] * 2
        self.limits = anyattn.Limits(max_requests=requests, max_tokens=requests, max_context=context)
        decision = anyattn.select(
            specs, dtype=torch.float32, device="cpu", backend=backend, page_size=1, limits=self.limits
        )
        self.context, self.slots = context, requests * context
        self.pool = anyattn.kv.create_pool(decision, num_slots=self.slots)
        self.table = anyattn.kv.RequestTable(max_requests=requests, max_context=context, device="cpu")
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.layers = [anyattn.AttentionLayer(spec, layer_id=i) for i, spec in enumerate(specs)]
        self.q = torch.zeros(requests, HEADS[0], SIZE)
        self.k, self.v = torch.zeros(requests, HEADS[1], SIZE), torch.zeros(requests, HEADS[1], SIZE)
        self.out = [torch.zeros_like(self.q) for _ in specs]
        self.shuffle(0)

    def shuffle(self, seed: int) -> None:
        """Another state of the world in the same memory: rows of the table, KV, and inputs."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.slots, generator=generator) + 1
        self.table.req_to_token[:-1] = order.view(-1, self.context).int()
        for layer in range(len(self.layers)):
            for cache in (self.pool.key_cache(layer), self.pool.value_cache(layer)):
                cache.normal_(generator=generator)
        for x in (self.q, self.k, self.v):
            x.normal_(generator=generator)

    def batch(self, seq_lens: Sequence[int], **options: object) -> anyattn.ForwardBatch:
        """The decode step in which each request reaches its length."""
        rows = list(range(len(seq_lens)))
        loc = [int(self.table.req_to_token[r, n - 1]) for r, n in zip(rows, seq_lens, strict=True)]
        return anyattn.ForwardBatch.decode(rows, list(seq_lens), loc, **options)

    def forward(self, plan: anyattn.Plan) -> None:
        """Both layers; results in `out`."""
        with anyattn.forward_context(self.backend, plan):
            for layer, out in zip(self.layers, self.out, strict=True):
                layer(self.q, self.k, self.v, plan.batch, out=out)

    def body(self, plan: anyattn.Plan) -> None:
        """What a graph records: the device half of planning, then the layers."""
        self.backend.init_forward_metadata_in_graph(plan)
        self.forward(plan)

    def eager(self, batch: anyattn.ForwardBatch) -> list[torch.Tensor]:
        """The same step without a graph."""
        plan = self.backend.init_forward_metadata(batch)
        self.forward(plan)
        return [out.clone() for out in self.out]
