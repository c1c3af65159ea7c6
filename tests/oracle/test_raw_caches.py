"""Storage by `[page, row]` agrees with the pool's own writer and reader in every layout."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.testing.raw_caches import raw_caches


@pytest.mark.parametrize("layout", ["NHD", "HND", "VECTORISED_5D"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_the_pool(layout: str, dtype: torch.dtype) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=16)
    pool = MHAPool([spec], num_slots=64, page_size=16, layout=layout, kv_dtype=dtype, dtype=dtype)
    slots = torch.tensor([16, 31, 40, 79, 18])
    k, v = torch.randn(5, 2, 32).to(dtype), torch.randn(5, 2, 16).to(dtype)
    pool.write(0, slots, k, v)
    at = slots // 16, slots % 16
    for cache, given in zip(raw_caches(pool), (k, v), strict=True):
        assert torch.equal(cache[at], given)
        cache[at] = given.flip(0)
    for read, given in zip(pool.gather(0, slots), (k, v), strict=True):
        assert torch.equal(read, given.flip(0))
