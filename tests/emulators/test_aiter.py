"""The AITER stand-in against the oracle, in both generations of its API: conventions, refusals, traps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import EmulationError, emulating
from anyattn.testing.signatures import Recorded, differences, signature_of

MAIN = "rocm:gfx942+amd-aiter==0.1.20"
LENGTHS = [7, 33, 18]
ROWS = [3, 1, 5]
BF16 = torch.bfloat16
FNUZ = torch.float8_e4m3fnuz
TOLERANCE = 8e-3
ONE = torch.ones(1)


@pytest.fixture(params=["pypi", "main"], name="aiter")
def _aiter(request: pytest.FixtureRequest) -> Iterator[Any]:
    with emulating("aiter", MAIN if request.param == "main" else None):
        yield importlib.import_module("aiter")


def _world(*, page: int = 16, dtype: torch.dtype = BF16, clean: bool = True, heads: int = 2) -> Pages:
    return pages(LENGTHS, page=page, heads=heads, dim=128, dtype=dtype, clean=clean)


def _v1(aiter: Any, world: Pages, q: torch.Tensor, **more: Any) -> torch.Tensor:
    given: dict[str, Any] = {
        "workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8), "scale": 0.1, "cu_query_lens": None,
        "block_tables": world.table, "context_lens": world.lengths, "max_context_len": 33,
        "alibi_slopes": None, "kv_cache_dtype": "auto", "kv_cache_layout": "NHD", "logits_soft_cap": 0.0,
        "k_scale": ONE, "v_scale": ONE,
    }  # fmt: skip
    out = torch.full_like(q, torch.nan)
    result = aiter.paged_attention_v1(
        out=out, query=q, key_cache=world.keys, value_cache=world.values, **{**given, **more}
    )
    assert result is out
    return out


def test_paged_attention_v1(aiter: Any) -> None:
    world, q = _world(), queries(3, 8, 128, BF16)
    assert close(_v1(aiter, world, q), world.expected(q, [1, 1, 1], scale=0.1)[0], TOLERANCE)
    capped = _v1(aiter, world, q, logits_soft_cap=1.5)
    assert close(capped, world.expected(q, [1, 1, 1], scale=0.1, logit_cap=1.5)[0], TOLERANCE)
    windowed = _v1(aiter, world, q, sliding_window=5)
    assert close(windowed, world.expected(q, [1, 1, 1], scale=0.1, window=5)[0], TOLERANCE)
    hnd = Pages(
        world.keys.transpose(1, 2).contiguous(), world.values.transpose(1, 2).contiguous(), world.table,
        world.lengths, world.slots,
    )  # fmt: skip
    assert torch.equal(_v1(aiter, hnd, q, kv_cache_layout="HND"), _v1(aiter, world, q))


def test_fp8_caches_are_the_chips_own(aiter: Any) -> None:
    world, q = _world(dtype=FNUZ), queries(3, 8, 128, BF16)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0]), "kv_cache_dtype": "fp8"}
    want, _ = world.expected(q, [1, 1, 1], scale=0.1, k_scale=0.5, v_scale=2.0)
    assert close(_v1(aiter, world, q, **scales), want, TOLERANCE)
    other = _world(dtype=torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="e4m3fnuz"):
        _v1(aiter, other, q, **scales)


def test_what_decode_refuses(aiter: Any) -> None:
    world, q = _world(), queries(3, 8, 128, BF16)
    with pytest.raises(ValueError, match="workspace_buffer is too small"):
        _v1(aiter, world, q, workspace_buffer=torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="too narrow"):
        _v1(aiter, world, q, block_tables=world.table[:, :1].contiguous())
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        _v1(aiter, world, q, kv_cache_dtype="int8")
    with pytest.raises(RuntimeError, match="int32"):
        _v1(aiter, world, q, context_lens=world.lengths.long())
    assert torch.isnan(_v1(aiter, _world(clean=False), q)).any()


def test_ragged_decode_has_csr_pages(aiter: Any) -> None:
    world, q = _world(), queries(3, 8, 128, BF16)
    counts = [-(-n // 16) for n in LENGTHS]
    indices = torch.cat([world.table[i, :n] for i, n in enumerate(counts)])
    last = torch.tensor([n - (c - 1) * 16 for n, c in zip(LENGTHS, counts, strict=True)], dtype=torch.int32)
    out = torch.empty_like(q)
    aiter.paged_attention_ragged(
        out, torch.zeros(1 << 20, dtype=torch.uint8), q, world.keys, world.values, 0.1, offsets_of(counts),
        indices, last, 16, 1, None, "auto", "NHD", 0.0, ONE, ONE,
    )  # fmt: skip
    assert close(out, world.expected(q, [1, 1, 1], scale=0.1)[0], TOLERANCE)


def test_the_assembly_kernel_has_vectorised_caches_and_a_scale_of_its_own(aiter: Any) -> None:
    world, q, x = _world(), queries(3, 8, 128, BF16), 8
    count = world.keys.shape[0]
    key = world.keys.permute(0, 2, 3, 1).reshape(count, 2, 128 // x, x, 16).permute(0, 1, 2, 4, 3)
    value = world.values.permute(0, 2, 1, 3).reshape(count, 2, 16 // x, x, 128).permute(0, 1, 2, 4, 3)
    args = (q, key.contiguous(), value.contiguous(), world.table, world.lengths, world.table.stride(0))
    assert close(aiter.pa_fwd_asm(*args), world.expected(q, [1, 1, 1])[0], TOLERANCE)
    with pytest.raises(RuntimeError, match="stride"):
        aiter.pa_fwd_asm(*args[:-1], 1)


def test_batch_prefill_reads_past_the_last_index(aiter: Any) -> None:
    world, q = _world(page=1), queries(9, 8, 128, BF16)
    tokens = torch.cat([torch.tensor(s) for s in world.slots]).int()
    padded = torch.cat([tokens, torch.zeros(128, dtype=torch.int32)])
    cu = offsets_of(ROWS)
    args = (q, world.keys[:, 0], world.values[:, 0], cu, offsets_of(LENGTHS), padded, 5, 33)
    out, lse = aiter.mha_batch_prefill_func(*args, causal=True, window_size=(4, 0), return_lse=True)
    want_out, want_lse = world.expected(q, ROWS, window=5)
    assert close(out, want_out, TOLERANCE)
    assert lse.shape == (8, 9)
    assert close(lse.T, want_lse, 1e-5)
    with pytest.raises(RuntimeError, match="past the last"):
        aiter.mha_batch_prefill_func(*args[:5], tokens, 5, 33, causal=True)


def test_varlen_windows_differ_by_generation(aiter: Any) -> None:
    q, k, v = queries(9, 8, 128, BF16), queries(14, 2, 128, BF16), queries(14, 2, 128, BF16)
    keys = [5, 1, 8]
    slots = [list(range(5)), [5], list(range(6, 14))]
    world = Pages(k[:, None], v[:, None], torch.zeros(3, 1), torch.zeros(3), slots)
    main = "sink_ptr" in signature_of({"aiter": aiter}, "aiter:flash_attn_varlen_func")
    window = (2, 0, 0) if main else (2, 0)
    args = (q, k, v, offsets_of(ROWS), offsets_of(keys), 5, 8)
    out = aiter.flash_attn_varlen_func(*args, causal=True, window_size=window)
    assert close(out, world.expected(q, ROWS, window=3)[0], TOLERANCE)
    if main:
        with pytest.raises(IndexError):
            aiter.flash_attn_varlen_func(*args, causal=True, window_size=(2, 0))
        sinks = torch.randn(8)
        out = aiter.flash_attn_varlen_func(*args, causal=True, sink_ptr=sinks)
        assert close(out, world.expected(q, ROWS, sinks=sinks)[0], TOLERANCE)


@pytest.mark.parametrize("host", [None, MAIN])
def test_unified_attention_moves_between_generations(host: str | None) -> None:
    path = "attention.unified_attention" if host else "unified_attention"
    with emulating("aiter", host):
        unified: Any = importlib.import_module(f"aiter.ops.triton.{path}").unified_attention
    world, q = _world(clean=False), queries(9, 8, 128, BF16)
    out, sinks = torch.empty_like(q), torch.randn(8)
    args = (q, world.keys, world.values, out, offsets_of(ROWS), 5, world.lengths, 33, 0.1)
    unified(*args, True, (4, 0), world.table, 0.0, None, ONE, ONE, sinks=sinks)
    assert close(out, world.expected(q, ROWS, scale=0.1, window=5, sinks=sinks)[0], TOLERANCE)
    with pytest.raises(AssertionError, match="Only causal"):
        unified(*args, False, (-1, -1), world.table, 0.0, None, ONE, ONE)


@pytest.mark.parametrize("host", [None, MAIN])
def test_mla_takes_a_page_size_where_it_took_a_scale(host: str | None) -> None:
    with emulating("aiter", host):
        decode: Any = importlib.import_module("aiter.mla").mla_decode_fwd
    world = pages(LENGTHS, page=1, heads=1, dim=576, dtype=BF16)
    world.values = world.keys[..., :512]
    q, o = queries(6, 16, 576, BF16), torch.empty(6, 16, 512, dtype=BF16)
    tokens = torch.cat([torch.tensor(s) for s in world.slots]).int()
    last = torch.ones(3, dtype=torch.int32)
    args = (q, world.keys[:, :, :, :], o, offsets_of([2, 2, 2]), offsets_of(LENGTHS), tokens, last, 2)
    decode(*args, sm_scale=0.07)
    assert close(o, world.expected(q, [2, 2, 2], scale=0.07)[0], TOLERANCE)
    if host:
        with pytest.raises(RuntimeError, match="page_size"):
            decode(*args, 0.07)
    with pytest.raises(RuntimeError, match="heuristic"):
        decode(q[:, :12].contiguous(), *args[1:2], o[:, :12], *args[3:], sm_scale=0.07)
    with pytest.raises(EmulationError, match="persistent"):
        decode(*args, sm_scale=0.07, work_meta_data=torch.zeros(1))


def test_mains_signatures() -> None:
    recorded = Recorded.load(Path(__file__).parent / "signatures" / "main" / "amd-aiter.json")
    with emulating("aiter", MAIN) as emulator:
        found = emulator.modules()
    ours = {target: signature_of(found, target) for target in recorded.signatures}
    live = Recorded(recorded.distribution, recorded.version, recorded.emulators, ours)
    assert differences(recorded, live) == []
