"""The `triton` backend on dual pools: window layers reach their slots through the map, inside the kernels."""

from __future__ import annotations

import pytest
import torch

from anyattn.core.kv.pools.base import EVICTED, UNMAPPED
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.window_runs import RUNS, spec
from anyattn.testing.windows import Served

offer_triton()


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("run", ["chunks", "several_sizes", "trees"])
def test_every_step_agrees_with_the_oracle(run: str, dual: bool) -> None:
    error, _ = RUNS[run](backend="triton", dual=dual)
    assert error < 2e-5


def test_pages_of_one_and_the_other_layout() -> None:
    for page_size, layout in ((1, "NHD"), (16, "HND")):
        error, _ = RUNS["chunks"](backend="triton", page_size=page_size, layout=layout)
        assert error < 2e-5


def test_virtual_ids() -> None:
    for dual in (True, False):
        error, _ = RUNS["chunks"](backend="triton", dual=dual, virtual=True)
        assert error < 2e-5


def test_a_token_without_a_slot_is_not_written_anywhere() -> None:
    served = Served([spec(None), spec(8)], backend="triton")
    layer, pool = served.layers[1], served.pool
    before = pool.key_cache(1).clone(), pool.value_cache(1).clone()
    k = torch.ones(3, 2, 16)
    served.backend.write_kv(layer, torch.tensor([UNMAPPED, EVICTED, 5]), k, k)
    for cache, was in zip((pool.key_cache(1), pool.value_cache(1)), before, strict=True):
        assert bool((cache[1, 1] == 1).all())
        was[1, 1] = 1
        assert torch.equal(cache.nan_to_num(7), was.nan_to_num(7))
