"""The FlashAttention-3 stand-ins against the oracle: conventions, refusals, traps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import EmulationError, emulating

ROWS = [3, 1, 5]
LENGTHS = [7, 33, 18]


@pytest.fixture(name="fa3")
def _fa3() -> Iterator[Any]:
    with emulating("fa3"):
        yield importlib.import_module("flash_attn_interface")


@pytest.fixture(name="sgl")
def _sgl() -> Iterator[Any]:
    with emulating("fa3", "cuda:sm90"):
        yield importlib.import_module("sgl_kernel.flash_attn")


def _call(function: Any, world: Pages, q: torch.Tensor, rows: list[int], **more: Any) -> Any:
    given: dict[str, Any] = {
        "cache_seqlens": world.lengths, "page_table": world.table, "cu_seqlens_q": offsets_of(rows),
        "max_seqlen_q": max(rows), "causal": True, "return_softmax_lse": True,
    }  # fmt: skip
    return function(q, world.keys, world.values, **{**given, **more})


def test_paged_causal_with_its_tuple_and_axes(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    found = _call(fa3.flash_attn_with_kvcache, world, q, ROWS)
    out, lse = world.expected(q, ROWS)
    assert len(found) == 4
    assert found[1].shape == (4, 9)
    assert found[1].dtype == torch.float32
    assert close(found[0], out)
    assert close(found[1].T, lse, 1e-5)
    alone = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, return_softmax_lse=False)
    assert torch.equal(alone, found[0])


def test_dense_queries_have_their_heads_in_the_middle(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(3, 4, 64)
    found = fa3.flash_attn_with_kvcache(
        q[:, None], world.keys, world.values, cache_seqlens=world.lengths, page_table=world.table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    out, lse = world.expected(q, [1, 1, 1])
    assert found[0].shape == (3, 1, 4, 64)
    assert found[1].shape == (3, 4, 1)
    assert close(found[0][:, 0], out)
    assert close(found[1][:, :, 0], lse, 1e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 17])
def test_the_window_is_a_radius(fa3: Any, window: int) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    found = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, window_size=(window - 1, 0))
    assert close(found[0], world.expected(q, ROWS, window=window)[0])
    wide = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, window_size=(window, 0))
    assert not close(wide[0], world.expected(q, ROWS, window=window)[0])


def test_bidirectional_without_causal(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    found = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, causal=False, window_size=(2, 2))
    out, _ = world.expected(q, ROWS, kind="bidirectional", window=3)
    assert close(found[0], out)


def test_sinks_count_in_the_sum(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.bfloat16)
    found = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, sinks=sinks)
    out, lse = world.expected(q, ROWS, sinks=sinks)
    assert close(found[0], out)
    assert close(found[1].T, lse, 1e-5)
    with pytest.raises(RuntimeError, match="sinks must have dtype bfloat16"):
        _call(fa3.flash_attn_with_kvcache, world, q, ROWS, sinks=sinks.float())


def test_requests_without_keys(fa3: Any) -> None:
    world, q = pages([0, 5]), queries(2, 4, 64)
    out, lse, *_ = _call(fa3.flash_attn_with_kvcache, world, q, [1, 1], causal=False)
    assert torch.equal(out[0], torch.zeros(4, 64, dtype=torch.float16))
    assert torch.isneginf(lse[:, 0]).all()
    assert torch.isfinite(lse[:, 1]).all()


def test_rows_in_front_of_all_keys_are_zero_and_their_sink_is_lost(fa3: Any) -> None:
    world, q = pages([2]), queries(4, 4, 64)
    out, lse, *_ = _call(fa3.flash_attn_with_kvcache, world, q, [4])
    assert torch.equal(out[:2], torch.zeros(2, 4, 64, dtype=torch.float16))
    assert torch.isneginf(lse[:, :2]).all()
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    _, lse, *_ = _call(fa3.flash_attn_with_kvcache, world, q, [4], sinks=sinks)
    assert torch.isnan(lse[:, :2]).all()


def test_a_longest_query_that_is_too_short_gives_garbage(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    out = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, max_seqlen_q=3)[0]
    assert torch.isnan(out[7:]).all()
    assert torch.isfinite(out[:7].float()).all()


def test_fp8_takes_descales_by_request_and_kv_head(fa3: Any) -> None:
    world, q = pages(LENGTHS, dtype=torch.float8_e4m3fn), queries(9, 4, 64, torch.float8_e4m3fn)
    one = torch.ones(3, 2)
    k_scale, v_scale = one * 0.5, one * 2.0
    found = _call(
        fa3.flash_attn_with_kvcache, world, q, ROWS, q_descale=one, k_descale=k_scale, v_descale=v_scale
    )
    out, lse = world.expected(q.float(), ROWS, k_scale=0.5, v_scale=2.0)
    assert found[0].dtype == torch.bfloat16
    assert close(found[0], out, 8e-3)
    assert close(found[1].T, lse, 1e-4)
    with pytest.raises(RuntimeError, match="k_descale must have shape"):
        _call(fa3.flash_attn_with_kvcache, world, q, ROWS, k_descale=torch.ones(3, 4))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"softcap": 30.0}, "softcapping"),
        ({"page_table": torch.zeros(3, 5, dtype=torch.int64)}, "page_table must have dtype torch.int32"),
        ({"page_table": torch.zeros(4, 5, dtype=torch.int32)}, "batch_size must be equal"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int64)}, "cu_seqlens_q must have dtype"),
        ({"max_seqlen_q": None}, "max_seqlen_q must be provided"),
        ({"cache_seqlens": torch.ones(3, dtype=torch.int64)}, "seqused_k must have dtype"),
        ({"page_table": torch.full((3, 5), 99, dtype=torch.int32)}, "illegal memory access"),
        ({"page_table": torch.ones(3, 1, dtype=torch.int32)}, "illegal memory access"),
    ],
)
def test_what_the_library_refuses(fa3: Any, change: dict[str, Any], text: str) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    with pytest.raises(RuntimeError, match=text):
        _call(fa3.flash_attn_with_kvcache, world, q, ROWS, **change)


def test_dtypes_and_sizes(fa3: Any) -> None:
    world = pages(LENGTHS)
    with pytest.raises(RuntimeError, match="same dtype"):
        _call(fa3.flash_attn_with_kvcache, world, queries(9, 4, 64, torch.bfloat16), ROWS)
    odd = pages(LENGTHS, dim=60)
    with pytest.raises(RuntimeError, match="multiple of 8"):
        _call(fa3.flash_attn_with_kvcache, odd, queries(9, 4, 60), ROWS)
    with pytest.raises(EmulationError, match="rotary_cos"):
        _call(fa3.flash_attn_with_kvcache, world, queries(9, 4, 64), ROWS, rotary_cos=torch.ones(2))


def test_unequal_heads_run_some_other_kernel_in_this_build(fa3: Any, sgl: Any) -> None:
    world, q = pages([5], dim=192, v_dim=128), queries(1, 4, 192)
    assert torch.isnan(_call(fa3.flash_attn_with_kvcache, world, q, [1])[0]).all()
    assert close(_call(sgl.flash_attn_with_kvcache, world, q, [1])[0], world.expected(q, [1])[0])


def test_tails_of_pages_that_are_loaded_whole(fa3: Any) -> None:
    dirty, clean = pages([130], page=128), pages([130], page=128, clean=True)
    few, many = queries(40, 4, 64), queries(100, 4, 64)
    kernel = fa3.flash_attn_with_kvcache
    assert close(_call(kernel, dirty, few, [40])[0], dirty.expected(few, [40])[0])
    assert torch.isnan(_call(kernel, dirty, many, [100])[0]).all()
    assert close(_call(kernel, clean, many, [100])[0], clean.expected(many, [100])[0])


def _metadata(module: Any, world: Pages, rows: list[int], **more: Any) -> torch.Tensor:
    given: dict[str, Any] = {
        "cache_seqlens": world.lengths, "qkv_dtype": torch.float16, "cu_seqlens_q": offsets_of(rows),
        "page_size": world.page, "causal": True,
    }  # fmt: skip
    width = world.table.shape[1] * world.page
    return module.get_scheduler_metadata(
        len(rows), max(rows), width, 4, 2, world.keys.shape[3], **{**given, **more}
    )


def test_metadata_belong_to_one_launch_and_one_step(fa3: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    made = _metadata(fa3, world, ROWS)
    assert made.dtype == torch.int32
    right = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, scheduler_metadata=made)[0]
    assert close(right, world.expected(q, ROWS)[0])
    later = pages([n + 1 for n in LENGTHS])
    assert torch.isnan(_call(fa3.flash_attn_with_kvcache, later, q, ROWS, scheduler_metadata=made)[0]).all()
    split = _call(fa3.flash_attn_with_kvcache, world, q, ROWS, scheduler_metadata=made, num_splits=1)[0]
    assert torch.isnan(split).all()
    with pytest.raises(RuntimeError, match="scheduler_metadata must have shape"):
        _call(fa3.flash_attn_with_kvcache, world, q, ROWS, scheduler_metadata=made, window_size=(3, 0))


def test_ragged_without_a_table(fa3: Any) -> None:
    q, k, v = queries(9, 4, 64), queries(14, 2, 64), queries(14, 2, 64)
    k_rows = [5, 1, 8]
    found = fa3.flash_attn_varlen_func(
        q, k, v, offsets_of(ROWS), offsets_of(k_rows), 5, 8, causal=True, return_attn_probs=True
    )
    assert len(found) == 2
    assert found[1].shape == (4, 9)
    starts = [0, 5, 6]
    world = Pages(
        k[None].transpose(0, 1), v[None].transpose(0, 1), torch.zeros(3, 1), torch.zeros(3),
        [list(range(s, s + n)) for s, n in zip(starts, k_rows, strict=True)],
    )  # fmt: skip
    out, lse = world.expected(q, ROWS)
    assert close(found[0], out)
    assert close(found[1].T, lse, 1e-5)


def test_sglang_writes_out_caps_and_absorbs(sgl: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    out = torch.zeros(9, 4, 64, dtype=torch.float16)
    found = _call(sgl.flash_attn_with_kvcache, world, q, ROWS, softcap=1.5, out=out)
    assert found[0] is out
    assert close(out, world.expected(q, ROWS, logit_cap=1.5)[0])
    latent = pages(LENGTHS, heads=1, dim=64, v_dim=512)
    rope, absorbed = queries(9, 8, 64), queries(9, 8, 512)
    got = _call(sgl.flash_attn_with_kvcache, latent, rope, ROWS, qv=absorbed, softmax_scale=0.1)[0]
    both = Pages(
        torch.cat([latent.keys, latent.values], -1), latent.values, latent.table, latent.lengths, latent.slots
    )
    assert close(got, both.expected(torch.cat([rope, absorbed], -1), ROWS, scale=0.1)[0])


def test_sglang_varlen_drops_its_page_table(sgl: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    with pytest.raises(RuntimeError, match="batch_size must be equal"):
        sgl.flash_attn_varlen_func(
            q, world.keys, world.values, offsets_of(ROWS), None, 5, 48, page_table=world.table,
            seqused_k=world.lengths, causal=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="max_seqlen_q"):
        sgl.flash_attn_varlen_func(q, q, q, offsets_of(ROWS), offsets_of(ROWS))


def test_vllm_takes_the_longest_query_first_and_version_2_unless_told() -> None:
    with emulating("fa3", "cuda:sm90"):
        vllm: Any = importlib.import_module("vllm.vllm_flash_attn")
    world, q = pages(LENGTHS), queries(9, 4, 64)
    given = {"seqused_k": world.lengths, "block_table": world.table, "causal": True, "window_size": [4, 0]}
    args = (q, world.keys, world.values, 5, offsets_of(ROWS), 80)
    out, lse = vllm.flash_attn_varlen_func(*args, **given, return_softmax_lse=True, fa_version=3)
    want_out, want_lse = world.expected(q, ROWS, window=5)
    assert close(out, want_out)
    assert close(lse.T, want_lse, 1e-5)
    with pytest.raises(EmulationError, match="version"):
        vllm.flash_attn_varlen_func(*args, **given)
    assert vllm.is_fa_version_supported(3)
