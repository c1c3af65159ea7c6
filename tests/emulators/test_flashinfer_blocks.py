"""FlashInfer's stand-in, block tables: trtllm-gen, XQA and the MLA functions as the library has them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import EmulationError, current_host, emulating

LENGTHS, HEADS, BF16, FP8 = [7, 40, 33], 4, torch.bfloat16, torch.float8_e4m3fn
SPACE = (8 << 20) + 1024


@pytest.fixture(name="decode", params=["cuda:sm100", "cuda:sm90"])
def _decode(request: pytest.FixtureRequest) -> Iterator[Any]:
    with emulating("trtllm_mha", request.param):
        yield importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache


@pytest.fixture(name="sm100")
def _sm100() -> Iterator[None]:
    with emulating("trtllm_mha"):
        yield


def space() -> torch.Tensor:
    return torch.zeros(SPACE, dtype=torch.uint8)


def world(*, page: int = 16, clean: bool = True, dtype: torch.dtype = BF16) -> Pages:
    return pages(LENGTHS, page=page, heads=2, dim=64, dtype=dtype, clean=clean)


def hnd(w: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    return w.keys.transpose(1, 2).contiguous(), w.values.transpose(1, 2).contiguous()


def test_decode_takes_hnd_and_a_whole_scale(decode: Any) -> None:
    w, q = world(), queries(3, HEADS, 64, BF16)
    given = (w.table, w.lengths, 64)
    for window, left in ((None, -1), (9, 8)):
        out = decode(q, hnd(w), space(), *given, bmm1_scale=0.2, window_left=left)
        assert close(out, w.expected(q, [1] * 3, scale=0.2, window=window)[0], 1e-2)
    same = decode(q, (w.keys, w.values), space(), *given, bmm1_scale=0.2, kv_layout="NHD")
    assert close(same, w.expected(q, [1] * 3, scale=0.2)[0], 1e-2)
    wrong = decode(q, hnd(w), space(), *given)  # there is no default of 1/sqrt(D)
    assert not close(wrong, w.expected(q, [1] * 3)[0], 1e-2)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_the_scale_of_values(decode: Any, dtype: torch.dtype) -> None:
    """XQA's one scale of K and V isn't read for 16-bit caches; the softmax scale is divided by it. On SM90
    its decode over 8-bit caches rounds queries so too.
    """
    w, q = world(dtype=dtype), queries(3, HEADS, 64, BF16)
    out = decode(q, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.2, bmm2_scale=3.0)
    trap = dtype == BF16 and current_host() == "cuda:sm90"
    rounded = q.to(FP8).to(BF16) if dtype == FP8 and current_host() == "cuda:sm90" else q
    want = w.expected(rounded, [1] * 3, scale=0.2 / 3 if trap else 0.2)[0]
    assert close(out, want if trap else want * 3, 1e-2)


def test_sinks_are_float32_tensors(decode: Any) -> None:
    w, q, sinks = world(), queries(3, HEADS, 64, BF16), torch.tensor([0.5, 2.0, -1.0, 0.0])
    out = decode(q, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.125, sinks=sinks)
    assert close(out, w.expected(q, [1] * 3, sinks=sinks)[0], 1e-2)
    with pytest.raises(RuntimeError, match="float"):
        decode(q, hnd(w), space(), w.table, w.lengths, 64, sinks=sinks.to(BF16))
    with pytest.raises(TypeError, match="sinks"):
        decode(q, hnd(w), space(), w.table, w.lengths, 64, sinks=[sinks])


def test_nan_in_the_tail_of_a_page_shows(decode: Any) -> None:
    w, q = world(clean=False), queries(3, HEADS, 64, BF16)
    out = decode(q, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.125)
    assert torch.isnan(out).any()


def test_a_request_without_keys_is_garbage(decode: Any) -> None:
    w, q = world(), queries(3, HEADS, 64, BF16)
    lengths = torch.tensor([7, 0, 33], dtype=torch.int32)
    out = decode(q, hnd(w), space(), w.table, lengths, 64, bmm1_scale=0.125)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[0]).all()


def test_lse_is_base_2_and_trtllm_gens_alone(sm100: None) -> None:
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    w, q = world(), queries(3, HEADS, 64, BF16)
    _, lse = decode(q, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.125, return_lse=True)
    assert torch.allclose(lse.double() * math.log(2), w.expected(q, [1] * 3)[1], atol=1e-4)
    with pytest.raises(NotImplementedError, match="lse"):
        decode(q, hnd(w), space(), w.table, w.lengths, 64, return_lse=True, backend="xqa")
    short = decode(q, hnd(w), space(), w.table, w.lengths, 39, bmm1_scale=0.125)
    assert torch.isnan(short[1]).all()  # 40 keys under a bound of 39


def test_xqa_needs_zero_semaphores_a_mask_and_its_pages() -> None:
    with emulating("trtllm_mha", "cuda:sm90"):
        decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        w, q = world(), queries(3, HEADS, 64, BF16)
        dirty = space().fill_(1)
        assert torch.isnan(decode(q, hnd(w), dirty, w.table, w.lengths, 64)).all()
        two = queries(6, HEADS, 64, BF16)
        with pytest.raises(AssertionError, match="Mask is required"):
            decode(two, hnd(w), space(), w.table, w.lengths, 64, q_len_per_req=2)
        words = torch.tensor([[1, 0], [3, 0]] * 3, dtype=torch.int32).to(torch.uint16).view(3, 2, 2)
        out = decode(
            two, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.125, q_len_per_req=2, mask=words
        )
        assert close(out, w.expected(two, [2] * 3)[0], 1e-2)
        small = pages(LENGTHS, page=8, heads=2, dim=64, dtype=BF16, clean=True)
        with pytest.raises(RuntimeError, match="page size 8"):
            decode(q, hnd(small), space(), small.table, small.lengths, 64)
    with emulating("trtllm_mha", "cuda:sm80"):
        decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        with pytest.raises(RuntimeError, match="SM90"):
            decode(q, hnd(w), space(), w.table, w.lengths, 64)


@pytest.mark.parametrize(("group", "right"), [(2, True), (15, False)])
def test_xqa_counts_the_heads_of_drafts_from_each_tile(group: int, right: bool) -> None:
    with emulating("trtllm_mha", "cuda:sm90"):
        decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        w, q = world(), queries(9, 2 * group, 64, BF16)
        words = torch.tensor([[1, 0], [3, 0], [7, 0]] * 3, dtype=torch.int32).to(torch.uint16).view(3, 3, 2)
        sinks = torch.randn(2 * group, generator=torch.Generator().manual_seed(1))
        out = decode(
            q, hnd(w), space(), w.table, w.lengths, 64, bmm1_scale=0.125, q_len_per_req=3, mask=words,
            sinks=sinks,
        )  # fmt: skip
        assert close(out, w.expected(q, [3] * 3, sinks=sinks)[0], 1e-2) is right


def test_context(sm100: None) -> None:
    context = importlib.import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
    w, rows = world(), [7, 3, 33]
    q, cum = queries(43, HEADS, 64, BF16), offsets_of(rows)
    given = (q, hnd(w), space(), w.table, w.lengths, 33, 40, 0.125, 1.0, 3, cum)
    out, lse = context(*given, offsets_of(LENGTHS), window_left=8, return_lse=True)
    want = w.expected(q, rows, window=9)
    assert close(out, want[0], 1e-2)
    assert torch.allclose(lse.double() * math.log(2), want[1], atol=1e-4)
    assert torch.isnan(context(*given, cum)).all()  # offsets of queries for those of keys
    with pytest.raises(NotImplementedError, match="non-causal"):
        context(*given, offsets_of(LENGTHS), causal=False, window_left=8)


def latent(*, clean: bool = True) -> Pages:
    w = pages(LENGTHS, page=32, heads=1, dim=576, dtype=BF16, clean=clean, extra=2)
    w.values = w.keys[..., :512]
    w.table = w.table[:, :4]
    return w


def test_latent_decode(sm100: None) -> None:
    decode = importlib.import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
    w, q = latent(), queries(6, 16, 576, BF16)
    want = w.expected(q, [2] * 3, scale=0.07)
    cache, q4 = w.keys[:, :, 0], q.view(3, 2, 16, 576)
    given: dict[str, Any] = {"bmm1_scale": 0.07, "return_lse": True}
    for backend, unit in (("trtllm-gen", math.log(2)), ("cute-dsl", 1.0)):  # their LSEs differ in base
        out, lse = decode(
            q4, cache, space(), 128, 512, 64, w.table, w.lengths, 64, backend=backend, **given
        )  # fmt: skip
        assert out.shape == (3, 2, 16, 512)
        assert close(out.reshape(-1, 16, 512), want[0], 1e-2)
        assert torch.allclose(lse.double() * unit, want[1], atol=1e-4)
    with pytest.raises(EmulationError, match="tuner"):
        decode(q4, cache, space(), 128, 512, 64, w.table, w.lengths, 64, **given)
    with pytest.raises(ValueError, match="block_num"):
        decode(q4, cache, space(), 128, 512, 64, w.table[:, :3], w.lengths, 64, backend="cute-dsl")
    with pytest.raises(NotImplementedError, match="cum_seq_lens_q"):
        decode(
            q, cache, space(), 128, 512, 64, w.table, w.lengths, 64, backend="trtllm-gen",
            cum_seq_lens_q=offsets_of([2] * 3), max_q_len=2, return_lse=True,
        )  # fmt: skip


def test_latent_decode_on_sm120() -> None:
    with emulating("flashinfer_mla", "cuda:sm120"):
        decode = importlib.import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla
        w, q = latent(), queries(3, 128, 576, BF16).view(3, 1, 128, 576)
        given = (q, w.keys[:, :, 0], space(), 128, 512, 64, w.table, w.lengths, 64)
        out = decode(*given, bmm1_scale=0.07, bmm2_scale=0.5)
        want = w.expected(q[:, 0], [1] * 3, scale=0.035)[0]
        assert out.shape == (3, 1, 128, 512)
        assert close(out[:, 0], want * 0.5, 1e-2)
        with pytest.raises(ValueError, match="Invalid shape"):
            decode(*given, out=torch.empty_like(out))
        with pytest.raises(NotImplementedError, match="lse"):
            decode(*given, return_lse=True)
        with pytest.raises(AssertionError, match="128"):
            decode(q[:, :, :16], *given[1:])


def test_ragged_prefill_of_materialised_latents(sm100: None) -> None:
    ragged = importlib.import_module("flashinfer.prefill").trtllm_ragged_attention_deepseek
    rows, keys = [2, 3], [5, 0]
    q, k, v = queries(5, 4, 192, BF16), queries(5, 4, 192, BF16), queries(5, 4, 128, BF16)
    cum_q, cum_k = offsets_of(rows), offsets_of(keys)
    lens = torch.tensor(keys, dtype=torch.int32)
    given = (q, k, v, space(), lens, 3, 5, 0.07, 1.0, 1.0, 2, -1, cum_q, cum_k, None, True, True)
    out, _ = ragged(*given)
    assert torch.isfinite(out[:2]).all()
    assert torch.isnan(out[2:]).all()  # nobody said that a request has no keys
    told, lse = ragged(
        *given, q_seq_lens_cpu=torch.tensor(rows), kv_seq_lens_cpu=torch.tensor(keys)
    )  # fmt: skip
    assert torch.equal(told[:2], out[:2])
    assert not told[2:].any()
    assert torch.isneginf(lse[2:]).all()
    with pytest.raises(AssertionError, match="head dimensions"):
        ragged(q, k, queries(5, 4, 64, BF16), *given[3:])
