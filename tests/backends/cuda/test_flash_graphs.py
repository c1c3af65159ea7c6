"""`fa3` in graphs: where its schedule stands, what a captured step bounds, and whom it serves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from flash_stands import TOKENSPEED, backend_of, decode, extend, slots, spec

import anyattn
from anyattn.core.capturing import marked_as_capturing
from anyattn.testing.emulators import emulating


def test_a_schedule_keeps_its_address_and_nothing_of_a_larger_step() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(backend.config.limits)
        found = []
        for count in (8, 3, 8, 3):
            plan = backend.init_forward_metadata_out_graph(decode(count), in_capture=True)
            backend.init_forward_metadata_in_graph(plan)
            found.append(_scheduled(plan))
    large, small, *again = found
    assert [each.data_ptr() for each in again] == [large.data_ptr(), small.data_ptr()]
    assert small.untyped_storage().nbytes() == small.nbytes < large.nbytes


def _scheduled(plan: Any) -> torch.Tensor:
    found = plan.private.calls[0].scheduled["scheduler_metadata"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("inference", [False, True])
def test_a_graph_reads_the_schedule_where_it_made_it_and_so_does_what_follows(inference: bool) -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(backend.config.limits)
        plan = backend.init_forward_metadata_out_graph(decode(3), in_capture=True)
        backend.init_forward_metadata_in_graph(plan)  # as before captures, to warm up
        warm = _scheduled(plan)
        with torch.inference_mode(inference), marked_as_capturing():
            backend.init_forward_metadata_in_graph(plan)
        made = _scheduled(plan)
        assert made is plan.private.calls[0].settled
        assert made.data_ptr() != warm.data_ptr(), "its own, not what other graphs write"
        for step, capturing in enumerate((False, True, False)):
            backend.init_forward_metadata_out_graph(decode(3, 60 + step), captured=plan)
            before = made.clone()
            with marked_as_capturing() if capturing else nullcontext():
                backend.init_forward_metadata_in_graph(plan)
            assert _scheduled(plan).data_ptr() == made.data_ptr()
            assert not torch.equal(made, before), "this step's"


def test_steps_outside_graphs_leave_their_schedule_alone() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(backend.config.limits)
        split = backend.init_forward_metadata(extend(20, 5, mode=anyattn.ForwardMode.SPLIT_PREFILL))
        mine = split.private.calls[0].scheduled["scheduler_metadata"]
        before = mine.clone()
        backend.init_forward_metadata(decode(3))
    assert torch.equal(mine, before)


def test_a_captured_step_bounds_all_that_replay_it() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(backend.config.limits)
        new = [*slots(0, 3, 4), *slots(1, 4, 4)]
        chunks = anyattn.ForwardBatch.extend([0, 1], [3, 4], [4, 4], new)
        plan = backend.init_forward_metadata_out_graph(chunks, in_capture=True)
        drafted = [*slots(0, 3, 6), *slots(1, 4, 6)]
        drafts = anyattn.ForwardBatch.verify([0, 1], [3, 4], [6, 6], drafted)
        verify = backend.init_forward_metadata_out_graph(drafts, in_capture=True)
        eager = backend.init_forward_metadata(chunks)
    assert plan.private.calls[0].arguments["max_seqlen_q"] == 8  # all of them may be one request's
    assert verify.private.calls[0].arguments["max_seqlen_q"] == 8  # Limits.max_draft_tokens
    assert eager.private.calls[0].arguments["max_seqlen_q"] == 4
    assert plan.private.clear
    assert not eager.private.clear


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mode", ["decode", "extend", "verify"])
def test_what_was_captured_serves_other_batches_of_its_shape(mode: str, window: int | None) -> None:
    def batch(prefix: list[int], new: list[int]) -> anyattn.ForwardBatch:
        places = [s for row, (p, n) in enumerate(zip(prefix, new, strict=True)) for s in slots(row, p, n)]
        if mode == "decode":
            return anyattn.ForwardBatch.decode([0, 1, 2], [p + 1 for p in prefix], places)
        make = anyattn.ForwardBatch.verify if mode == "verify" else anyattn.ForwardBatch.extend
        return make([0, 1, 2], prefix, new, places)

    first, later = ([1, 1, 1], [1, 1, 1]) if mode == "decode" else ([4, 4, 4], [2, 7, 3])
    layer = anyattn.AttentionLayer(spec(sliding_window=window), 0)
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [layer.spec])
        for cache in (backend.pool.key_cache(0), backend.pool.value_cache(0)):
            cache.copy_(torch.randn(cache.shape))
        backend.init_cuda_graph_state(backend.config.limits)
        plan = backend.init_forward_metadata_out_graph(batch([3, 4, 5], first), in_capture=True)
        backend.init_forward_metadata_in_graph(plan)
        baked = dict(plan.private.calls[0].scheduled)
        replayed = batch([30, 0, 77], later)
        assert backend.init_forward_metadata_out_graph(replayed, captured=plan) is plan
        backend.init_forward_metadata_in_graph(plan)
        for name, value in plan.private.calls[0].scheduled.items():
            same = value is baked[name] or (
                isinstance(value, torch.Tensor) and value.data_ptr() == baked[name].data_ptr()
            )
            assert same or value == baked[name], name
        q, k, v = (torch.randn(replayed.num_tokens, h, 64).to(torch.bfloat16) for h in (4, 2, 2))
        with anyattn.forward_context(backend, plan):
            got = layer(q, k, v, replayed)
        eager = backend.init_forward_metadata(again := batch([30, 0, 77], later))
        with anyattn.forward_context(backend, eager):
            want = layer(q, k, v, again)
    assert isinstance(got, torch.Tensor)
    assert isinstance(want, torch.Tensor)
    assert float((got.float() - want.float()).abs().max()) < 1e-2
