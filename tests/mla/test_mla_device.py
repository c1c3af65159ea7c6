"""Latent kernels on a GPU: DeepSeek's sizes in bf16 and fp8, and bits that don't depend on the batch."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.testing.mla_sweep import sweep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("space", ["half", "fp8"])
def test_random_steps_on_the_gpu(space: str) -> None:
    outcome = sweep("triton", "cuda", 30, 0, [space])
    assert outcome["passed"] == 30, outcome["failed"][:3]


def served(prefix: list[int], extend: list[int], mode: str, first: int = 0) -> torch.Tensor:
    """Rows of one batch-invariant step; token p of request i always has the same latent and query."""
    spec = anyattn.AttentionSpec(
        num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, mla=anyattn.MLASpec()
    )
    decision = anyattn.select(
        [spec],
        dtype="bfloat16",
        device="cuda",
        backend="triton",
        page_size=64,
        deterministic="batch-invariant",
    )
    pool = anyattn.kv.create_pool(decision, num_slots=8 * 1024)
    table = anyattn.kv.RequestTable(max_requests=8, max_context=1024, device="cuda")
    backend = anyattn.create_backend(decision, pool, table)
    generator = torch.Generator("cuda").manual_seed(5)
    latents, queries = (
        torch.randn(8, 1024, n, 576, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (1, 16)
    )
    keys, q, slots = [], [], []
    for i, (p, e) in enumerate(zip(prefix, extend, strict=True)):
        at = torch.arange(1024, device="cuda") + 64 + i * 1024
        table.req_to_token[i] = at
        pool.write(0, at[:p], latents[first + i, :p])
        keys.append(latents[first + i, p : p + e])
        q.append(queries[first + i, p : p + e])
        slots += at[p : p + e].tolist()
    rows = list(range(len(prefix)))
    batch = (
        anyattn.ForwardBatch.decode(rows, [p + 1 for p in prefix], slots)
        if mode == "decode"
        else anyattn.ForwardBatch.extend(rows, prefix, extend, slots)
    )
    layer = anyattn.AttentionLayer(spec, 0)
    with anyattn.forward_context(backend, backend.init_forward_metadata(batch)):
        out = layer(torch.cat(q), torch.cat(keys), None, batch)
    assert isinstance(out, torch.Tensor)
    return out


def test_batch_invariant_bits_on_the_gpu() -> None:
    whole = served([0, 0, 0], [900, 70, 333], "extend")
    assert torch.equal(served([0], [70], "extend", first=1), whole[900:970])
    assert torch.equal(served([512], [388], "extend"), whole[512:900])
    tail = served([899, 69, 332], [1, 1, 1], "decode")
    assert torch.equal(tail, torch.stack((whole[899], whole[969], whole[1302])))
