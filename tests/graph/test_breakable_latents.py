"""Latent layers and hybrids of two backends in segments."""

from __future__ import annotations

import pytest
import torch
from prefill_world import BUCKETS, World
from torch import nn

import anyattn
from anyattn.core.graph.breakable import BreakableRunner
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.token_buckets import TokenBuckets
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.errors import GraphError
from anyattn.testing.mla_cases import MLACase

SPEC = MLACase(num_q_heads=2).spec()
LIMITS = anyattn.Limits(max_requests=3, max_tokens=16, max_context=40)
ROPE, RANK, NOPE = SPEC.mla.qk_rope_head_dim, SPEC.mla.kv_lora_rank, SPEC.mla.qk_nope_head_dim


class Latents:
    """A body of one latent layer, its rope part given apart."""

    def __init__(self, policy: anyattn.MLAPolicy | None) -> None:
        decision = anyattn.select(
            [SPEC], dtype="float32", device="cpu", page_size=4, backend="torch_native", limits=LIMITS
        )
        pool = anyattn.kv.create_pool(decision, num_slots=120)
        table = anyattn.kv.RequestTable(max_requests=3, max_context=40)
        for row in range(3):
            table.req_to_token[row] = torch.arange(40) + 4 + 40 * row
        self.backend = anyattn.create_backend(decision, pool, table, mla=policy)
        weights = [torch.randn(2, size, RANK) / 8 for size in (NOPE, SPEC.mla.v_head_dim)]
        self.layer = anyattn.MLAAttention(SPEC, 0, anyattn.MLAProjections(*weights))
        self.project = nn.Linear(12, 2 * NOPE + 2 * ROPE + RANK + ROPE)
        self.x = torch.zeros(16, 12)

    def body(self, batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        nope, rope, latent = self.project(x).split([2 * NOPE, 2 * ROPE, RANK + ROPE], dim=1)
        heads = (nope.unflatten(1, (2, NOPE)), rope.unflatten(1, (2, ROPE)))
        return self.layer(*heads, latent[:, None], batch).flatten(1) * 2

    def runner(self) -> BreakableRunner:
        return BreakableRunner(
            self.backend, self.body, RecorderPlatform(poison=True), limits=LIMITS, inputs={"x": self.x},
            token_buckets=TokenBuckets([4, 16]),
        )  # fmt: skip


def test_absorbed_latents_run_in_segments() -> None:
    torch.manual_seed(0)
    latents = Latents(anyattn.MLAPolicy(method=anyattn.MLAMethod.ABSORBED))
    runner = latents.runner()
    runner.capture()
    for row, prefix, new in ((0, 0, 12), (1, 8, 3), (0, 12, 5), (2, 0, 16), (1, 11, 4)):
        start = 4 + 40 * row + prefix
        batch = anyattn.ForwardBatch.extend([row], [prefix], [new], list(range(start, start + new)))
        x = torch.randn(new, 12)
        got = runner.replay(batch, x=x).clone()
        plan = latents.backend.init_forward_metadata(batch)
        with torch.no_grad(), anyattn.forward_context(latents.backend, plan):
            torch.testing.assert_close(got, latents.body(batch, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [None, anyattn.MLAMethod.MATERIALISED])
def test_latent_layers_need_one_method(method: anyattn.MLAMethod | None) -> None:
    with pytest.raises(GraphError, match=r"latent layers in segments need one method.*MLAMethod\.ABSORBED"):
        Latents(anyattn.MLAPolicy(method=method)).runner()


def test_a_policy_replaced_later_is_noticed() -> None:
    latents = Latents(anyattn.MLAPolicy(method=anyattn.MLAMethod.ABSORBED))
    runner = latents.runner()
    runner.capture()
    latents.backend.mla.policy = anyattn.MLAPolicy(method=anyattn.MLAMethod.MATERIALISED)
    batch = anyattn.ForwardBatch.extend([0], [0], [6], list(range(4, 10)))
    with pytest.raises(GraphError, match="another method than the segments"):
        runner.replay(batch, x=torch.randn(6, 12))


def test_hybrids_route_each_step_to_the_child_of_its_mode() -> None:
    world, other = World(), World()
    other.backend.pool = other.backend.compiler.pool = world.pool
    other.backend.table = other.backend.compiler.table = world.table
    world.backend = HybridBackend(world.backend, other.backend)
    runner = BreakableRunner(
        world.backend, world.body, RecorderPlatform(poison=True), limits=world.limits, inputs={"x": world.x},
        token_buckets=BUCKETS, captured_metadata=True,
    )  # fmt: skip
    runner.capture()
    steps = [
        world.extend([7, 2]),
        (anyattn.ForwardBatch.decode([1], [9], world.slots([1], [8], [1])), torch.randn(1, world.x.shape[1])),
    ]
    for batch, x in steps:
        got = runner.replay(batch, x=x).clone()
        torch.testing.assert_close(got, world.eager(batch, x), rtol=1e-5, atol=1e-5)
