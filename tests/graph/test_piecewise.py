"""Prefill traced by torch.compile, split at the attention op, captured in pieces on the CPU recorder."""

from __future__ import annotations

import random

import pytest
import torch
from prefill_world import BUCKETS, World

import anyattn
from anyattn.core.graph import piecewise
from anyattn.core.graph.breakable_calls import EagerCall
from anyattn.core.graph.piecewise import Pieces, PiecewiseRunner, piecewise_backend
from anyattn.core.graph.recorder import RecorderGraph, RecorderPlatform
from anyattn.errors import GraphError


@pytest.fixture(scope="module")
def served() -> tuple[World, PiecewiseRunner, list[Pieces]]:
    """A captured runner, and every trace that its capture made."""
    torch._dynamo.reset()
    random.seed(7)
    world, traces = World(), []

    class Counted(Pieces):
        def __init__(self, graph: torch.fx.GraphModule) -> None:
            super().__init__(graph)
            traces.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecewise, "Pieces", Counted)
        runner = PiecewiseRunner(
            world.backend, world.body, RecorderPlatform(poison=True), limits=world.limits,
            inputs={"x": world.x}, token_buckets=BUCKETS,
        )  # fmt: skip
        runner.capture()
    return world, runner, traces


def test_replays_equal_eager_steps_in_every_bucket(
    served: tuple[World, PiecewiseRunner, list[Pieces]],
) -> None:
    world, runner, _ = served
    for new in ([8], [3, 4], [9], [16], [15], [17], [5, 1, 1, 8], [31], [16, 16], [1], [2, 6], [10, 11, 9]):
        batch, x = world.extend(new)
        got = runner.replay(batch, x=x).clone()
        torch.testing.assert_close(got, world.eager(batch, x), rtol=1e-5, atol=1e-5)


def test_one_trace_serves_all_buckets(served: tuple[World, PiecewiseRunner, list[Pieces]]) -> None:
    world, runner, traces = served
    assert len(traces) == 1
    assert traces[0].attention == {"submod_1", "submod_3"}
    batch, _ = world.extend([5])
    entry = runner.entry(batch)
    assert [type(step) for step in entry.steps] == [
        RecorderGraph, EagerCall, RecorderGraph, EagerCall, RecorderGraph
    ]  # fmt: skip
    assert not any(
        "attention" in name for s in entry.steps if isinstance(s, RecorderGraph) for name in s.operations
    )


def test_padded_rows_of_outputs_are_zero(served: tuple[World, PiecewiseRunner, list[Pieces]]) -> None:
    world, runner, _ = served
    full, x = world.extend([16])
    runner.replay(full, x=x)
    batch, x = world.extend([2, 7])
    runner.replay(batch, x=x)
    outs = [step.out for step in runner.entry(batch).steps if isinstance(step, EagerCall)]
    assert len(outs) == 2
    for out in outs:
        assert torch.all(out[9:] == 0)
        assert torch.all(out[:9].abs().sum(1) > 0)


def test_the_compiled_model_runs_without_a_runner(
    served: tuple[World, PiecewiseRunner, list[Pieces]],
) -> None:
    world, _, _ = served
    batch, x = world.extend([4, 3])
    want = world.eager(batch, x)
    with torch.no_grad(), anyattn.forward_context(world.backend, world.backend.init_forward_metadata(batch)):
        got = torch.compile(world.body, backend=piecewise_backend, fullgraph=True)(batch, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_model_without_attention_is_refused() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Linear(3, 3))
    with pytest.raises(GraphError, match="the traced graph calls no attention layer"):
        piecewise_backend(graph, [])


def test_a_traced_body_has_inputs_alone() -> None:
    world = World()
    with pytest.raises(GraphError, match=r"can't read the plan.*use BreakableRunner"):
        PiecewiseRunner(
            world.backend, world.body, RecorderPlatform(), limits=world.limits, captured_metadata=True
        )
