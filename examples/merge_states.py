"""Attention over two halves of a context, merged exactly by their log-sum-exps.

This is how a shared prefix, a context split over devices or a ragged and a paged part are put together.

python examples/merge_states.py
"""

from __future__ import annotations

import torch

import anyattn

HEADS, DIM, CONTEXT, CUT = 4, 32, 48, 32


def main() -> None:
    """The newest token of a request attends to 48 keys at once, and to 32 + 16 of them."""
    torch.manual_seed(0)
    spec = anyattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM)
    decision = anyattn.select(spec, dtype=torch.float32, device="cpu", page_size=16, features=["lse"])
    pool = anyattn.kv.create_pool(decision, num_slots=256)
    table = anyattn.kv.RequestTable(max_requests=3, max_context=64)
    backend = anyattn.create_backend(decision, pool, table)
    layer = anyattn.AttentionLayer(spec, layer_id=0)

    slots = torch.arange(pool.page_size, pool.page_size + CONTEXT)
    table.req_to_token[0, :CONTEXT] = slots  # the whole request
    table.req_to_token[1, :CUT] = slots[:CUT]  # the same slots as two requests of their own
    table.req_to_token[2, : CONTEXT - CUT] = slots[CUT:]

    fill = anyattn.ForwardBatch.extend([0], [0], [CONTEXT], slots)
    q, k, v = (torch.randn(CONTEXT, HEADS, DIM) for _ in range(3))
    with anyattn.forward_context(backend, backend.init_forward_metadata(fill)):
        layer(q, k, v, fill)

    # k and v are None: everything is read from the pool. One query for each of the three rows.
    query = torch.randn(1, HEADS, DIM)
    rows, lengths = [0, 1, 2], [CONTEXT, CUT, CONTEXT - CUT]
    read = anyattn.ForwardBatch.extend(rows, [n - 1 for n in lengths], [1, 1, 1], None)
    with anyattn.forward_context(backend, backend.init_forward_metadata(read)):
        out, lse = layer(query.repeat(3, 1, 1), None, None, read, save_kv_cache=False, return_lse=True)

    whole, head, tail = (anyattn.AttentionState(out[i : i + 1], lse[i : i + 1]) for i in range(3))
    merged = head.merge(tail)
    error = float((merged.out - whole.out).abs().max())
    print(f"{CUT} + {CONTEXT - CUT} keys merged: largest difference from {CONTEXT} at once {error:.1e}")
    assert error < 1e-6
    assert torch.allclose(merged.lse, whole.lse, atol=1e-5)


if __name__ == "__main__":
    main()
