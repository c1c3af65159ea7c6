"""`fa3` and `fa4`: what the builds are called with, by stand-ins that note it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flash_stands import (
    SGLANG,
    TOKENSPEED,
    VLLM,
    Calls,
    attend,
    backend_of,
    decode,
    extend,
    operator,
    slots,
    spec,
    watched,
)

import anyattn
from anyattn.core.capturing import marked_as_capturing
from anyattn.core.traits import SharedReadEnds, TreeMaskMode
from anyattn.testing.emulators import emulating

MODULE = "flash_attn_interface"


def layers_of(*specs: anyattn.AttentionSpec) -> list[anyattn.AttentionLayer]:
    """Layers 0 .. of a model, with sinks of one where they want them."""
    return [
        anyattn.AttentionLayer(s, i, sinks=torch.ones(s.num_q_heads) if s.sinks else None)
        for i, s in enumerate(specs)
    ]


@pytest.mark.parametrize(
    ("name", "host", "module", "table", "used", "window"),
    [
        ("fa3", TOKENSPEED, MODULE, "page_table", "cache_seqlens", (6, 0)),
        ("fa3", SGLANG, "sgl_kernel.flash_attn", "page_table", "cache_seqlens", (6, 0)),
        ("fa3", VLLM, "vllm.vllm_flash_attn", "block_table", "seqused_k", (6, 0)),
        ("fa4", "cuda:sm90", "flash_attn.cute", "page_table", "seqused_k", (6, 0)),
        ("fa4", "cuda:sm100", "flash_attn.cute", "page_table", "seqused_k", (6, 0)),
    ],
)
def test_each_build_gets_its_own_names(
    name: str, host: str, module: str, table: str, used: str, window: tuple[int, int]
) -> None:
    windowed = spec(sliding_window=7)
    with watched(name, host, module) as (paged, ragged, _):
        backend = backend_of(name, host, [windowed])
        attend(backend, decode(3), layers_of(windowed))
    (call,) = paged.seen or ragged.seen
    # The table begins at the page of the first key that a window shows: 40 - 7 = 33 stands in the third.
    assert call[table].tolist() == [[row * 8 + 3] for row in range(3)]
    assert call[used].tolist() == [8, 8, 8]
    if module in ("vllm.vllm_flash_attn", "flash_attn.cute"):
        assert call["cu_seqlens_q"].tolist() == [0, 1, 2, 3]
        assert call["max_seqlen_q"] == 1
    else:  # one query each, as a rectangle
        assert "cu_seqlens_q" not in call
        assert call["q"].shape[:2] == (3, 1)
    assert tuple(call["window_size"]) == window
    assert call["causal"] is True
    assert call["softmax_scale"] == pytest.approx(0.125)
    assert call.get("fa_version", 3) == 3


def test_a_window_to_both_sides_and_none_at_all() -> None:
    both = spec(sliding_window=7, kind=anyattn.AttentionKind.BIDIRECTIONAL)
    none = spec(kind=anyattn.AttentionKind.BIDIRECTIONAL)
    with watched("fa4", "cuda:sm90", "flash_attn.cute") as (_, calls, _):
        backend = backend_of("fa4", "cuda:sm90", [both, none])
        attend(backend, extend(20, 5), layers_of(both, none))
    first, second = calls.seen
    assert first["window_size"] == (6, 6)
    assert first["causal"] is False
    assert "window_size" not in second  # both the builds' defaults say "all", in their own ways


def test_one_schedule_a_step_for_the_layers_that_it_was_made_for() -> None:
    wide, narrow = spec(), spec(num_q_heads=2)
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, schedules):
        backend = backend_of("fa3", TOKENSPEED, [wide, wide, narrow])
        attend(backend, decode(3), layers_of(wide, wide, narrow))
    (schedule,) = schedules.seen
    first, second, third = (call.get("scheduler_metadata") for call in paged.seen)
    assert first is not None
    assert first is second
    assert third is None  # two heads instead of four: another grid
    assert schedule["num_heads_q"] == 4
    assert schedule["max_seqlen_k"] == paged.seen[0]["page_table"].shape[1] * 16
    assert schedule["page_size"] == 16
    assert schedule["cache_seqlens"].tolist() == [40, 40, 40]
    assert schedule["num_splits"] == paged.seen[0]["num_splits"] == 0


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


@pytest.mark.parametrize(
    ("name", "host", "deterministic", "splits"),
    [
        ("fa3", TOKENSPEED, None, 0),
        ("fa3", TOKENSPEED, "run-to-run", 0),
        ("fa3", TOKENSPEED, "batch-invariant", 1),
        ("fa4", "cuda:sm90", None, 1),  # it asserts that no keys are split on SM90
        ("fa4", "cuda:sm100", None, 0),
    ],
)
def test_how_many_parts_keys_are_split_into(
    name: str, host: str, deterministic: str | None, splits: int
) -> None:
    with emulating(name, host):
        backend = backend_of(name, host, [spec()], deterministic=deterministic)
        plan = backend.init_forward_metadata(decode(2))
    (call,) = plan.private.calls
    assert call.arguments["num_splits"] == splits


@pytest.mark.parametrize(
    ("prefix", "given", "deterministic", "ragged"),
    [
        (0, True, None, True),
        (0, False, None, False),
        (4, True, None, False),
        (0, True, "batch-invariant", False),
    ],
)
def test_steps_without_cached_keys_read_k_and_v_alone(
    prefix: int, given: bool, deterministic: str | None, ragged: bool
) -> None:
    layer = spec()
    with watched("fa3", TOKENSPEED, MODULE) as (paged, varlen, _):
        backend = backend_of("fa3", TOKENSPEED, [layer], deterministic=deterministic)
        attend(backend, extend(prefix, 9), layers_of(layer), given=given)
    assert (len(varlen.seen), len(paged.seen)) == ((1, 0) if ragged else (0, 1))
    if ragged:
        assert varlen.seen[0]["cu_seqlens_k"].tolist() == [0, 9]


def test_the_operator_itself_writes_into_out_where_its_schema_is_known() -> None:
    layer, calls = spec(), Calls()
    out = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, _):
        sys.modules[MODULE].flash_attn_3_gpu = operator(calls)  # type: ignore[attr-defined]
        backend = backend_of("fa3", TOKENSPEED, [layer])
        (result,) = attend(backend, decode(2), layers_of(layer), out=out)
    (call,) = calls.seen
    assert not paged.seen
    assert result is out
    assert call["out"].data_ptr() == out.data_ptr()
    assert torch.equal(out, torch.ones_like(out))
    assert call["seqused_k"].tolist() == [40, 40]
    assert call["is_causal"] is True
    assert "window_size_left" not in call
    assert call["scheduler_metadata"] is not None


def test_an_operator_with_another_schema_is_left_alone() -> None:
    layer, calls = spec(), Calls()
    other = operator(calls)
    other.fwd.default._schema = SimpleNamespace(arguments=[SimpleNamespace(name="q")])
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, _):
        sys.modules[MODULE].flash_attn_3_gpu = other  # type: ignore[attr-defined]
        attend(backend_of("fa3", TOKENSPEED, [layer]), decode(2), layers_of(layer))
    assert (len(paged.seen), len(calls.seen)) == (1, 0)


def test_out_in_strided_rows_is_copied_into() -> None:
    layer, calls = spec(), Calls()
    wide = torch.zeros(2, 4 * 64 + 3, dtype=torch.bfloat16)
    out = wide[:, : 4 * 64].view(2, 4, 64)
    with emulating("fa3", TOKENSPEED):
        sys.modules[MODULE].flash_attn_3_gpu = operator(calls)  # type: ignore[attr-defined]
        attend(backend_of("fa3", TOKENSPEED, [layer]), decode(2), layers_of(layer), out=out)
    assert "out" not in calls.seen[0]
    assert bool((out == 1).all())
    assert not wide[:, 4 * 64 :].any()


def test_sinks_go_in_as_the_build_takes_them_and_stay_out_of_a_partial_state() -> None:
    layer = spec(sinks=True)
    (with_sinks,) = layers_of(layer)
    for name, host, module, argument, dtype in (
        ("fa3", TOKENSPEED, MODULE, "sinks", torch.bfloat16),
        ("fa3", VLLM, "vllm.vllm_flash_attn", "s_aux", torch.bfloat16),
        ("fa4", "cuda:sm90", "flash_attn.cute", "learnable_sink", torch.float32),
    ):
        with watched(name, host, module) as (paged, ragged, _):
            backend = backend_of(name, host, [layer])
            attend(backend, decode(2), [with_sinks])
            ((_, lse),) = attend(backend, decode(2), [with_sinks], return_lse=True)
        plain, partial = paged.seen or ragged.seen
        assert plain[argument].dtype == dtype
        assert argument not in partial
        assert bool((lse > 1).all())  # a sink of one alone would be log(e)


def test_fp8_takes_queries_and_scales_in_the_pools_dtype() -> None:
    layer = spec()
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, schedules):
        backend = backend_of("fa3", TOKENSPEED, [layer], kv_dtype=torch.float8_e4m3fn, features=["kv_scales"])
        backend.pool.set_scales(0, [0.5, 2.0], 1.0)
        plan = backend.init_forward_metadata(decode(3))
        big = torch.full((3, 4, 64), 1000.0, dtype=torch.bfloat16)
        key = torch.ones(3, 2, 64, dtype=torch.bfloat16)
        with anyattn.forward_context(backend, plan):
            out = layers_of(layer)[0](big, key, key, plan.batch)
    (call,) = paged.seen
    assert call["q"].dtype == torch.float8_e4m3fn
    assert call["q"].float().max() == 448  # saturated: a plain cast would give NaN
    assert call["k_descale"].tolist() == [[0.5, 2.0]] * 3
    assert "v_descale" not in call
    assert schedules.seen[0]["qkv_dtype"] == torch.float8_e4m3fn
    assert out.dtype == torch.bfloat16
    assert backend.traits(anyattn.ForwardMode.DECODE).rounds_queries


def test_padded_rows_are_not_given_to_the_kernel() -> None:
    layer = spec()
    with watched("fa3", TOKENSPEED, MODULE) as (paged, _, _):
        backend = backend_of("fa3", TOKENSPEED, [layer])
        batch = anyattn.ForwardBatch.extend([0], [20], [5], [36, 37, 38, 39, 40, 0, 0], num_padding_tokens=2)
        (out,) = attend(backend, batch, layers_of(layer))
    assert paged.seen[0]["q"].shape[0] == 5
    assert not out[5:].any()


def test_an_empty_step_calls_nothing() -> None:
    layer = spec()
    with watched("fa3", TOKENSPEED, MODULE) as (paged, varlen, _):
        backend = backend_of("fa3", TOKENSPEED, [layer])
        (out,) = attend(backend, extend(20, 0), layers_of(layer))
    assert out.shape == (0, 4, 64)
    assert not paged.seen
    assert not varlen.seen


def test_what_is_declared() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
    traits = backend.traits(anyattn.ForwardMode.TARGET_VERIFY)
    assert traits.shared_read_ends is SharedReadEnds.IN_REPLAY
    assert traits.tree_mask is TreeMaskMode.QLEN_ONLY
    assert traits.ragged_verify
    assert backend.compiler.filler is None  # a CPU compiles no Triton


def test_windows_are_not_declared_batch_invariant() -> None:
    options: dict[str, Any] = {"device": "cpu", "host": TOKENSPEED, "dtype": torch.bfloat16}
    from anyattn.testing.selecting import select_for

    select_for([spec()], backend="fa3", deterministic="batch-invariant", **options)
    with pytest.raises(anyattn.errors.SelectionError, match="batch-invariant"):
        select_for([spec(sliding_window=7)], backend="fa3", deterministic="batch-invariant", **options)


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
