"""A multi-step draft with branches on one layer, checked step by step against the oracle."""

from __future__ import annotations

import random
from typing import Any

import torch

import anyattn
from anyattn.testing import oracle

HEADS, KV_HEADS, DIM = 4, 2, 16
SPEC = anyattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)


def decide(page: int, layout: str, **options: Any) -> anyattn.Decision:
    limits = anyattn.Limits(max_requests=8, max_tokens=64, max_context=64, max_draft_tokens=16)
    options = {"backend": "torch_native", "device": "cpu"} | options
    return anyattn.select(
        [SPEC], dtype=torch.float32, page_size=page, layout=layout, limits=limits, **options
    )


def run_draft(
    page: int, seed: int, *, layout: str = "NHD", top_k: int = 3, steps: int = 3, on_device: bool = False,
    **options: Any,
) -> float:  # fmt: skip
    """The worst error of all branches and steps. Draft slots are drawn from all over the pool."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    decision = decide(page, layout, **options)
    pool = anyattn.kv.create_pool(decision, num_slots=256 // page * page)
    source = anyattn.kv.RequestTable(max_requests=5, max_context=40, device="cpu")
    info = anyattn.speculative.DraftInfo(max_requests=4, top_k=top_k, max_steps=steps, max_context=48)
    backend = anyattn.create_draft_backend(decision, pool, info.table, branches=top_k)
    layer = anyattn.AttentionLayer(SPEC, 0)
    keys, values = (torch.full((pool.total_slots, KV_HEADS, DIM), torch.nan) for _ in range(2))

    def store(slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        keys[slots], values[slots] = k, v

    def random_rows(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, DIM, generator=generator)

    rows, seq = [3, 0, 4], [rng.randint(1, 30) for _ in range(3)]
    pages = rng.sample(range(1, pool.num_pages), sum(-(-n // page) for n in seq))
    for row, length in zip(rows, seq, strict=True):
        own = [pages.pop() for _ in range(-(-length // page))]
        slots = torch.tensor([p * page + i for p in own for i in range(page)][:length])
        source.req_to_token[row, :length] = slots.int()
        k, v = random_rows(length, KV_HEADS), random_rows(length, KV_HEADS)
        pool.write(0, slots, k, v)
        store(slots, k, v)
    unused = [s for s in range(pool.page_size, pool.total_slots) if bool(keys[s, 0, 0].isnan())]
    free = rng.sample(unused, 3 * top_k * steps)
    info.begin(source, torch.tensor(rows) if on_device else rows, torch.tensor(seq) if on_device else seq)
    chains: list[list[list[int]]] = [[[] for _ in range(top_k)] for _ in rows]
    worst = 0.0
    for step in range(steps):
        slots = torch.tensor([[free.pop() for _ in range(top_k)] for _ in rows])
        parents = torch.tensor([[rng.randrange(top_k) for _ in range(top_k)] for _ in rows])
        batch = info.step(slots, parents if step else None)
        for b in range(3):
            above = parents[b].tolist() if step else range(top_k)
            chains[b] = [[*chains[b][p], int(slots[b, j])] for j, p in enumerate(above)]
        count = 3 * top_k
        q, k, v = (random_rows(count, h) for h in (HEADS, KV_HEADS, KV_HEADS))
        store(slots.flatten(), k, v)
        with anyattn.forward_context(backend, backend.init_forward_metadata(batch)):
            out = layer(q, k, v, batch)
        requests = [
            oracle.OracleRequest(
                slots=[*source.req_to_token[rows[b], : seq[b]].tolist(), *chain], num_queries=1
            )
            for b in range(3)
            for chain in chains[b]
        ]
        want, _ = oracle.attend(q, keys, values, requests, scale=SPEC.scale)
        worst = max(worst, oracle.relative_error(out, want))
        assert batch.seq_lens.tolist() == [n + step + 1 for n in seq for _ in range(top_k)]
    for b in range(3):
        tree = anyattn.speculative.Tree(tuple(info.parents[b].tolist()))
        for j in range(top_k):
            assert len(tree.path(1 + (steps - 1) * top_k + j)) == steps + 1
    return worst
