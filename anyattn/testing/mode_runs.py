"""Lives of requests in the rarer modes and kinds: split prefill, block diffusion, encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import anyattn
from anyattn.core.kv.allocator import PageAllocator, pages_for, slot_range
from anyattn.core.spec import AttentionKind
from anyattn.testing import oracle
from anyattn.testing.window_runs import spec
from anyattn.testing.windows import Served

__all__ = ["MODE_RUNS", "cross_attention"]


def split_prefill(**options: Any) -> float:
    """A prefill in ranges of layers, with whole decode steps of others between them."""
    served = Served([spec(None), spec(8), spec(None, kv_shared_with=0), spec(None)], **options)
    old, new = served.admit(), served.admit()
    worst = served.step({old: 11})
    opened = served.open({new: 23}, mode="split_prefill")
    worst = max(worst, served.run(opened, [0, 1]))
    worst = max(worst, served.step({old: 1}, mode="decode"))
    worst = max(worst, served.run(opened, [2]))
    worst = max(worst, served.step({old: 1}, mode="decode"), served.run(opened, [3]))
    served.close(opened)
    return max(worst, served.step({old: 1, new: 1}, mode="decode"))


def block_diffusion(**options: Any) -> float:
    """Blocks of 8: a prompt of several blocks, one block denoised three times, then kept, then the next."""
    served = Served([spec(None), spec(None, num_kv_heads=4)], **options)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 24, two: 8}, mode="dllm_extend")
    for _ in range(3):
        opened = served.open({one: 8, two: 8}, mode="dllm_extend")
        worst = max(worst, served.run(opened, range(2)))
        served.close(opened, keep=False)
    worst = max(worst, served.step({one: 8, two: 8}, mode="dllm_extend"))
    return max(worst, served.step({one: 8, two: 16}, mode="dllm_extend"))


def two_sided(**options: Any) -> float:
    """Bidirectional layers, with and without a window, on a cached prefix."""
    kind = AttentionKind.BIDIRECTIONAL
    served = Served([spec(None, kind=kind), spec(5, kind=kind)], **options)
    one, two = served.admit(), served.admit()
    worst = served.step({one: 12, two: 3})
    return max(worst, served.step({one: 7, two: 9}))


def cross_attention(
    *, page_size: int = 4, backend: str = "torch_native", device: str = "cpu", layout: str = "NHD"
) -> float:
    """Encoder KV is stored by the first step and read by later ones, whatever the page size.

    Both tables begin at column 0: encoder pages lie apart from the decoder's.
    """
    specs = [spec(None), spec(None, kind=AttentionKind.CROSS)]
    encoder_lens, generator = [page_size + 3, 1, 2 * page_size], torch.Generator().manual_seed(page_size)
    decision = anyattn.select(
        specs, dtype=torch.float32, device=device, backend=backend, page_size=page_size, layout=layout,
        features=["lse"],
    )  # fmt: skip
    pool = anyattn.kv.create_pool(decision, num_slots=24 * page_size + 96 // page_size * page_size)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=32, max_encoder=256, device=device)
    made, pages = (
        anyattn.create_backend(decision, pool, table),
        PageAllocator(pool.num_slots, page_size, seed=1),
    )
    layers = [anyattn.AttentionLayer(s, i) for i, s in enumerate(specs)]
    assert table.encoder_to_token is not None
    own, encoded = [], []
    for row, count in enumerate(encoder_lens):
        own.append(slot_range(pages.allocate(pages_for(12, page_size)), 0, 12, page_size))
        encoded.append(slot_range(pages.allocate(pages_for(count, page_size)), 0, count, page_size))
        table.req_to_token[row, :12] = torch.tensor(own[-1], dtype=torch.int32)
        table.encoder_to_token[row, :count] = torch.tensor(encoded[-1], dtype=torch.int32)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys = [random(n, 2, 16) for n in encoder_lens]
    values = [random(n, 2, 16) for n in encoder_lens]
    worst, lengths = 0.0, [0, 0, 0]
    for new in ([6, 2, 1], [1, 1, 1], [2, 4, 1], [1, 1, 1]):
        slots = [s for o, n, e in zip(own, lengths, new, strict=True) for s in o[n : n + e]]
        first = lengths == [0, 0, 0]
        fields: dict[str, Any] = {"encoder_lens": encoder_lens}
        if first:
            fields["encoder_out_cache_loc"] = [s for e in encoded for s in e]
        total = [n + e for n, e in zip(lengths, new, strict=True)]
        batch = (
            anyattn.ForwardBatch.decode([0, 1, 2], total, slots, **fields)
            if new == [1, 1, 1]
            else anyattn.ForwardBatch.extend([0, 1, 2], lengths, new, slots, **fields)
        )
        with anyattn.forward_context(made, made.init_forward_metadata(batch)):
            tokens = sum(new)
            x = [random(tokens, h, 16).to(device) for h in (4, 2, 2)]
            layers[0](*x, batch)
            q = random(tokens, 4, 16)
            kv = (torch.cat(keys).to(device), torch.cat(values).to(device)) if first else (None, None)
            out, lse = layers[1](q.to(device), *kv, batch, return_lse=True)
        requests = _encoder_requests(encoder_lens, new)
        want, want_lse = oracle.attend(
            q,
            torch.cat(keys).double(),
            torch.cat(values).double(),
            requests,
            scale=specs[1].scale,
            kind="cross",
        )
        worst = max(worst, oracle.relative_error(out, want), oracle.relative_error(lse, want_lse, floor=1.0))
        lengths = total
    return worst


def _encoder_requests(encoder_lens: list[int], new: list[int]) -> list[oracle.OracleRequest]:
    requests, start = [], 0
    for count, queries in zip(encoder_lens, new, strict=True):
        requests.append(oracle.OracleRequest(slots=range(start, start + count), num_queries=queries))
        start += count
    return requests


MODE_RUNS: Mapping[str, Callable[..., float]] = {
    run.__name__: run for run in (split_prefill, block_diffusion, two_sided)
}
"""Runs that take the keywords of `Served`."""
