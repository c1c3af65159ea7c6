"""`fa3` and `fa4`: what the builds are called with, by stand-ins that note it."""

from __future__ import annotations

import sys
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
    spec,
    watched,
)

import anyattn
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
