"""What a prefill in segments may not have: each refusal by name, and the segments stay usable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from prefill_world import BUCKETS, World

import anyattn
from anyattn.core.graph.breakable import BreakableRunner
from anyattn.core.graph.objects import GraphObject
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.token_buckets import TokenBuckets
from anyattn.core.step_backend import StepBackend
from anyattn.errors import BatchError, GraphError


@pytest.fixture
def world() -> World:
    return World()


def _runner(world: World, body: Callable[..., object] | None = None, **options: object) -> BreakableRunner:
    given = {"limits": world.limits, "inputs": {"x": world.x}, "token_buckets": BUCKETS, **options}
    return BreakableRunner(world.backend, body or world.body, RecorderPlatform(poison=True), **given)


def test_refused_steps_change_nothing(world: World) -> None:
    runner = _runner(world)
    batch, x = world.extend([6])
    with pytest.raises(GraphError, match=r"never captured; asked: 8 tokens.*runner\.capture"):
        runner.replay(batch, x=x)
    runner.capture()
    want = runner.replay(batch, x=x).clone()
    long, much = world.extend([17, 16])
    with pytest.raises(
        GraphError, match="more tokens than the largest captured bucket; asked: 33; allowed: <= 32"
    ):
        runner.replay(long, x=much)
    assert "prefill in chunks" in str(runner.can_replay(long))
    with pytest.raises(GraphError, match="an empty step"):
        runner.replay(anyattn.ForwardBatch.idle())
    with pytest.raises(GraphError, match="layers in ranges"):
        runner.replay(batch.view(forward_mode=anyattn.ForwardMode.SPLIT_PREFILL), x=x)
    with pytest.raises(GraphError, match="input without a static buffer; asked: y; allowed: x"):
        runner.replay(batch, y=x)
    with pytest.raises(GraphError, match="shape of input 'x'"):
        runner.replay(batch, x=x[:5])
    with pytest.raises(BatchError, match="beyond the pool"):
        runner.replay(anyattn.ForwardBatch.extend([0], [0], [1], [10_000]), x=x[:1])
    assert torch.equal(runner.replay(batch, x=x), want)


def test_a_replaced_pool_is_noticed(world: World) -> None:
    runner = _runner(world)
    runner.capture()
    batch, x = world.extend([6])
    world.backend.pool = World().pool
    with pytest.raises(GraphError, match="pool was replaced"):
        runner.replay(batch, x=x)


def test_no_capture_or_replay_inside_a_capture(world: World) -> None:
    runner = _runner(world)
    runner.capture()
    batch, x = world.extend([6])
    for inner in (runner.capture, lambda: runner.replay(batch, x=x)):
        with pytest.raises(GraphError, match="inside another capture"):
            RecorderPlatform().new_graph().capture(inner)
    assert runner.replay(batch, x=x).shape == x.shape


@pytest.mark.parametrize("name", ["seq_lens", "positions", "forward_mode"])
def test_a_segment_that_reads_the_batch_is_refused(world: World, name: str) -> None:
    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        assert batch.num_tokens in BUCKETS.sizes
        return world.model(x, batch) + getattr(batch, name).sum()

    with pytest.raises(GraphError, match=rf"can't read batch\.{name}.*input of the runner"):
        _runner(world, body).capture()


def test_a_segment_that_reads_the_plan_says_so(world: World) -> None:
    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        return world.model(x * anyattn.current_context().plan.positions[:, None], batch)

    with pytest.raises(GraphError, match=r"can't read plan\.positions.*captured_metadata=True"):
        _runner(world, body).capture()


def test_a_segment_with_a_host_sync_is_refused_with_its_line(world: World) -> None:
    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        out = world.model(x, batch)
        return out if out.sum().item() > 0 else -out

    runner = _runner(world, body)
    with pytest.raises(GraphError, match=r"item.*test_breakable_refusals"):
        runner.capture()
    assert torch.ones(1).item() == 1  # nothing of the recorder is left behind


def test_rows_picked_before_the_last_layer_are_refused(world: World) -> None:
    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        return world.model(x[:4], batch)

    with pytest.raises(GraphError, match="part of the bucket's rows; asked: 4; allowed: 32"):
        _runner(world, body).capture()


def test_encoder_kv_is_stored_outside(world: World) -> None:
    spec = replace(world.model.attention[0].spec, kind=anyattn.AttentionKind.CROSS)
    layer = anyattn.AttentionLayer(spec, 0)

    def body(batch: anyattn.ForwardBatch, x: torch.Tensor) -> torch.Tensor:
        q, k, v = world.model.qkv[0](x).split(world.model.rows, dim=1)
        return layer(q, k, v, batch)

    with pytest.raises(GraphError, match="stores the encoder's KV between segments"):
        _runner(world, body).capture()


def test_a_backend_that_cannot_run_between_graphs_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    traits = type(world.backend).traits
    monkeypatch.setattr(
        type(world.backend),
        "traits",
        lambda self, mode: replace(traits(self, mode), eager_between_graphs=False),
    )
    with pytest.raises(GraphError, match="torch_native doesn't run between captured segments in extend"):
        _runner(world)


def test_wrappers_run_between_graphs_where_all_children_do() -> None:
    able, unable = anyattn.core.traits.Traits(), anyattn.core.traits.Traits(eager_between_graphs=False)
    assert anyattn.core.traits.Traits.combine([able, able]).eager_between_graphs
    assert not anyattn.core.traits.Traits.combine([able, unable]).eager_between_graphs


def test_static_inputs_hold_the_largest_bucket(world: World) -> None:
    with pytest.raises(GraphError, match="static input 'x' is shorter than the largest bucket; asked: 4"):
        _runner(world, inputs={"x": world.x[:4]})
    for sizes in ([], [0, 4]):
        with pytest.raises(GraphError, match="buckets of tokens"):
            TokenBuckets(sizes)


def test_metadata_has_room_for_the_limits(world: World) -> None:
    runner = _runner(world, captured_metadata=True)
    runner.capture()
    batch, x = world.extend([6])
    with pytest.raises(GraphError, match="slots to write; asked: 1 requests, no out_cache_loc"):
        runner.replay(batch.view(out_cache_loc=None), x=x)
    assert runner.replay(batch, x=x).shape == x.shape


def test_backends_without_metadata_for_segments_say_so(world: World) -> None:
    with pytest.raises(GraphError, match="makes no metadata that captured segments could read"):
        StepBackend.init_forward_metadata_for_breakable_cuda_graph_capture(world.backend, None)


def test_platforms_that_capture_in_one_piece_say_so(world: World) -> None:
    class Whole(GraphObject):
        def capture(self, body: Callable[[], None]) -> None:
            body()

        def replay(self) -> None:
            pass

    class Platform(RecorderPlatform):
        def new_graph(self) -> Whole:
            return Whole()

    runner = BreakableRunner(
        world.backend,
        world.body,
        Platform(),
        limits=world.limits,
        inputs={"x": world.x},
        token_buckets=BUCKETS,
    )
    with pytest.raises(GraphError, match="Whole is captured in one piece"):
        runner.capture()
