"""Three requests in one step: two prompts and one decode, checked against plain softmax attention.

python examples/mixed_batch.py
"""

from __future__ import annotations

import torch

import anyattn

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last `len(q)` tokens to all of k and v, from the formula."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def main() -> None:
    """Prefill one request, then run a mixed step with two newcomers."""
    torch.manual_seed(0)
    spec = anyattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    decision = anyattn.select(spec, dtype=torch.float32, device="cpu", page_size=PAGE)
    pool = anyattn.kv.create_pool(decision, num_slots=64 * PAGE)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=128)
    backend = anyattn.create_backend(decision, pool, table)
    layer = anyattn.AttentionLayer(spec, layer_id=0)

    # Pages may stand in any order; page 0 belongs to nobody.
    pages = torch.randperm(12) + 1
    for row in range(3):
        slots = pages[4 * row : 4 * row + 4, None] * PAGE + torch.arange(PAGE)
        table.req_to_token[row, : 4 * PAGE] = slots.flatten()

    def step(batch: anyattn.ForwardBatch, tokens: int) -> tuple[torch.Tensor, ...]:
        q, k, v = (torch.randn(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        plan = backend.init_forward_metadata(batch)
        with anyattn.forward_context(backend, plan):
            return q, k, v, layer(q, k, v, batch)

    first = anyattn.ForwardBatch.extend([2], [0], [20], table.req_to_token[2, :20])
    _, k_cached, v_cached, _ = step(first, 20)

    # Rows 0 and 1 bring prompts of 33 and 7 tokens; row 2 decodes its token number 20. Decode rows come last.
    slots = torch.cat([table.req_to_token[0, :33], table.req_to_token[1, :7], table.req_to_token[2, 20:21]])
    mixed = anyattn.ForwardBatch.mixed([0, 1, 2], [0, 0, 20], [33, 7, 1], slots, num_decode=1)
    q, k, v, out = step(mixed, 41)

    expected = [
        plain(q[:33], k[:33], v[:33]),
        plain(q[33:40], k[33:40], v[33:40]),
        plain(q[40:], torch.cat([k_cached, k[40:]]), torch.cat([v_cached, v[40:]])),
    ]
    error = float((out - torch.cat(expected)).abs().max())
    print(decision.summary())
    print(f"3 requests, {len(q)} tokens in one step; largest difference from plain attention {error:.1e}")
    assert error < 1e-5


if __name__ == "__main__":
    main()
