"""Prefill in CUDA graphs with eager attention between them, on those of these backends that the host has."""

from __future__ import annotations

import random

import pytest
import torch
from prefill_world import BUCKETS, World

from anyattn.core.graph.breakable import BreakableRunner
from anyattn.core.graph.breakable_calls import EagerCall
from anyattn.core.graph.piecewise import PiecewiseRunner
from anyattn.errors import SelectionError
from anyattn.platforms.cuda_graphs import CUDAGraphPlatform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


@pytest.mark.parametrize("kind", [BreakableRunner, PiecewiseRunner])
@pytest.mark.parametrize("backend", ["torch_native", "triton", "flashinfer", "fa3"])
def test_replays_equal_eager_steps_on_the_gpu(backend: str, kind: type[BreakableRunner]) -> None:
    random.seed(7)
    try:
        world = World(backend=backend, size=64, page=16, device="cuda", dtype=torch.bfloat16)
    except SelectionError as error:
        pytest.skip(f"{backend}: {error.message}")
    runner = kind(
        world.backend, world.body, CUDAGraphPlatform(), limits=world.limits, inputs={"x": world.x},
        token_buckets=BUCKETS,
    )  # fmt: skip
    runner.capture()
    for new in ([8], [3, 4], [9], [32], [17], [5, 1, 1, 8], [31], [16, 16], [1], [2, 6], [10, 11, 9]):
        batch, x = world.extend(new)
        got, want = runner.replay(batch, x=x).clone(), world.eager(batch, x)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert torch.equal(runner.replay(batch, x=x), got)
        for call in (step for step in runner.entry(batch).steps if isinstance(step, EagerCall)):
            assert torch.all(call.out[sum(new) :] == 0)
    assert sum(nbytes for _, nbytes in runner.memory()) > 0
