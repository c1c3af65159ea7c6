"""Bad input to the graph logic: each refused by name, with the remedy, and captured graphs stay usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import ModelKind
from anyattn.core.graph.runner import GraphRunner
from anyattn.errors import GraphError
from anyattn.testing.emulators import emulating
from anyattn.testing.graph_checks import Labs
from anyattn.testing.graph_emulated import install_recordable
from anyattn.testing.graph_kit import graph_subject


@pytest.fixture(name="labs")
def _labs() -> Iterator[Labs]:
    with emulating("fa3"):
        subject = graph_subject("fa3", "cpu", install_recordable("fa3").host, (ModelKind.DENSE,))
        yield subject.labs(subject.setups()[0], replays=1)


@pytest.fixture(name="refused")
def _refused(labs: Labs) -> Callable[[Callable[[], object]], str]:
    """What a refusal says; a replay afterwards must be right."""
    _ = labs.runner

    def attempt(action: Callable[[], object]) -> str:
        with pytest.raises(GraphError) as caught:
            action()
        assert labs.judged(labs.lab.draw(3)) == []
        return str(caught.value)

    return attempt


Refused = Callable[[Callable[[], object]], str]


def test_a_batch_over_the_largest_bucket(labs: Labs, refused: Refused) -> None:
    step = labs.lab.draw(6)
    said = refused(lambda: labs.runner.replay(step.batch, **step.inputs))
    assert "more requests than the largest captured bucket; asked: 6; allowed: <= 5" in said
    assert "capture a larger bucket, split the batch, or run this step eagerly" in said
    assert "largest captured bucket" in str(labs.runner.can_replay(step.batch))


def test_a_mode_never_captured(labs: Labs, refused: Refused) -> None:
    lab = labs.lab
    chain = anyattn.ForwardBatch.verify([0], [4], [3], lab.slots[0, 4:7].tolist())
    said = refused(lambda: labs.runner.replay(chain))
    assert "never captured" in said
    assert "runner.capture(ForwardMode.TARGET_VERIFY, tokens_per_request=3)" in said


def test_a_tree_where_nothing_of_that_mode_was_captured(labs: Labs, refused: Refused) -> None:
    """The mode is what's missing, not the mask."""
    lab = labs.lab
    mask = anyattn.VerifyMask.allocate(
        anyattn.TreeMaskMode.QLEN_ONLY, max_requests=1, draft_tokens=3, max_context=300
    )
    tree = anyattn.ForwardBatch.verify(
        [0], [4], [3], lab.slots[0, 4:7].tolist(), mask=mask, positions=[4, 5, 5]
    )
    assert "never captured" in refused(lambda: labs.runner.replay(tree))


def test_a_backend_without_graph_support(labs: Labs, refused: Refused) -> None:
    spec = labs.lab.setup.specs()[0]
    decision = anyattn.select([spec], dtype="float32", device="cpu", backend="torch_native", page_size=4)
    pool = anyattn.kv.create_pool(decision, num_slots=64)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=32)
    backend = anyattn.create_backend(decision, pool, table)
    limits = anyattn.Limits(max_requests=4, max_tokens=4, max_context=32)
    runner = GraphRunner(backend, lambda batch: torch.zeros(1), labs.lab.platform, limits=limits)
    said = refused(runner.capture)
    assert "torch_native can't be captured in decode" in said
    assert "run it eagerly, or choose another backend for this phase" in said


def test_a_replay_after_the_pool_was_replaced(labs: Labs, refused: Refused) -> None:
    lab, step = labs.lab, labs.lab.draw(2)

    def replay() -> None:
        kept = lab.backend.pool
        lab.backend.pool = anyattn.kv.create_pool(lab.decision, num_slots=kept.num_slots)
        try:
            labs.runner.replay(step.batch, **step.inputs)
        finally:
            lab.backend.pool = kept

    said = refused(replay)
    assert "the KV pool was replaced, or its storage moved" in said
    assert "make a new GraphRunner, and capture again" in said


def test_a_capture_inside_a_capture(labs: Labs, refused: Refused) -> None:
    other = labs.lab.runner(capture=False)
    outer = labs.hooks.inner.new_graph()
    said = refused(lambda: outer.capture(other.capture))
    assert "capture inside another capture" in said
    assert "capture before or after the other capture" in said


def test_a_replay_inside_a_capture_records_nothing(labs: Labs, refused: Refused) -> None:
    step = labs.lab.draw(2)
    outer = labs.hooks.inner.new_graph()
    said = refused(lambda: outer.capture(lambda: labs.runner.replay(step.batch, **step.inputs) and None))
    assert "replay inside another capture" in said


def test_prefill_has_no_full_graph(labs: Labs, refused: Refused) -> None:
    said = refused(lambda: labs.runner.capture(ForwardMode.EXTEND))
    assert "extend steps have no full graph" in said
    assert "piecewise or breakable" in said


def test_a_batch_of_padding_alone_is_legal(labs: Labs) -> None:
    """An idle rank of a data-parallel group joins the step of the others."""
    lab = labs.lab
    row = lab.table.padding_row
    batch = anyattn.ForwardBatch.decode([row] * 3, [1] * 3, [0] * 3, num_padding_requests=3)
    inputs = {name: torch.zeros(3, *x.shape[1:], dtype=x.dtype) for name, x in labs.runner.inputs.items()}
    out = labs.runner.replay(batch, **inputs)
    assert all(x.shape[0] == 3 and bool(torch.isfinite(x).all()) for x in out.values())
    entry = labs.runner.entry(batch)
    assert entry.plan.batch.num_padding_requests == entry.plan.batch.num_padding_tokens == 5
