"""The FlashAttention-4 stand-in against the oracle: conventions, refusals, traps."""

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


@pytest.fixture(name="fa4")
def _fa4() -> Iterator[Any]:
    with emulating("fa4"):
        yield importlib.import_module("flash_attn.cute")


@pytest.fixture(name="blackwell")
def _blackwell() -> Iterator[Any]:
    with emulating("fa4", "cuda:sm100"):
        yield importlib.import_module("flash_attn.cute")


def _call(module: Any, world: Pages, q: torch.Tensor, rows: list[int], **more: Any) -> Any:
    given: dict[str, Any] = {
        "seqused_k": world.lengths, "page_table": world.table, "cu_seqlens_q": offsets_of(rows),
        "max_seqlen_q": max(rows), "causal": True, "return_lse": True,
    }  # fmt: skip
    return module.flash_attn_varlen_func(q, world.keys, world.values, **{**given, **more})


def test_always_a_pair(fa4: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    out, lse = _call(fa4, world, q, ROWS)
    want_out, want_lse = world.expected(q, ROWS)
    assert lse.shape == (4, 9)
    assert close(out, want_out)
    assert close(lse.T, want_lse, 1e-5)
    again, nothing = _call(fa4, world, q, ROWS, return_lse=False)
    assert torch.equal(again, out)
    assert nothing is None
    assert fa4.__version__ == "0.0.0"


@pytest.mark.parametrize("window", [1, 5, 17])
def test_windows(fa4: Any, window: int) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    found = _call(fa4, world, q, ROWS, window_size=(window - 1, 0))[0]
    assert close(found, world.expected(q, ROWS, window=window)[0])
    none = _call(fa4, world, q, ROWS, window_size=(-1, -1))[0]
    assert close(none, world.expected(q, ROWS)[0])
    with pytest.raises(EmulationError, match="negative bound"):
        _call(fa4, world, q, ROWS, window_size=(-1, 0))


def test_cap_and_sinks(fa4: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    out, lse = _call(fa4, world, q, ROWS, learnable_sink=sinks, softcap=2.0)
    want_out, want_lse = world.expected(q, ROWS, sinks=sinks, logit_cap=2.0)
    assert close(out, want_out)
    assert close(lse.T, want_lse, 1e-5)
    empty = pages([0, 4])
    _, lse = _call(fa4, empty, queries(2, 4, 64), [1, 1], learnable_sink=sinks, causal=False)
    assert torch.equal(lse[:, 0], sinks)


def test_a_page_of_one_tile_is_loaded_whole(fa4: Any) -> None:
    q = queries(1, 4, 64)
    whole, parts = pages([130], page=128), pages([130], page=64)
    assert torch.isnan(_call(fa4, whole, q, [1])[0]).all()
    assert close(_call(fa4, parts, q, [1])[0], parts.expected(q, [1])[0])
    clean = pages([130], page=128, clean=True)
    assert close(_call(fa4, clean, q, [1])[0], clean.expected(q, [1])[0])


def test_absorbed_latents_on_blackwell_alone(fa4: Any, blackwell: Any) -> None:
    latent = pages(LENGTHS, heads=1, dim=64, v_dim=512)
    rope, absorbed = queries(9, 8, 64), queries(9, 8, 512)
    with emulating("fa4", "cuda:sm100"):
        out, lse = _call(blackwell, latent, rope, ROWS, qv=absorbed, softmax_scale=0.1)
        with pytest.raises(AssertionError, match="local"):
            _call(blackwell, latent, rope, ROWS, qv=absorbed, window_size=(3, 0))
    both = Pages(
        torch.cat([latent.keys, latent.values], -1), latent.values, latent.table, latent.lengths, latent.slots
    )
    want_out, want_lse = both.expected(torch.cat([rope, absorbed], -1), ROWS, scale=0.1)
    assert close(out, want_out)
    assert lse.shape == (9, 8)
    assert close(lse, want_lse, 1e-5)
    with emulating("fa4"), pytest.raises(AssertionError, match="not supported on SM90"):
        _call(fa4, latent, rope, ROWS, qv=absorbed)


def test_chips(fa4: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    with emulating("fa4", "cuda:sm120"), pytest.raises(AssertionError, match="paged KV not supported"):
        _call(fa4, world, q, ROWS)
    with emulating("fa4"), pytest.raises(AssertionError, match="SplitKV"):
        _call(fa4, world, q, ROWS, num_splits=4)
    wide = pages([5], dim=256)
    with emulating("fa4"):
        assert close(_call(fa4, wide, queries(1, 4, 256), [1])[0], wide.expected(queries(1, 4, 256), [1])[0])


def test_what_the_library_refuses(fa4: Any) -> None:
    world, q = pages(LENGTHS), queries(9, 4, 64)
    with pytest.raises(AssertionError, match="int32"):
        _call(fa4, world, q, ROWS, page_table=world.table.long())
    with pytest.raises(AssertionError, match="same dtype"):
        _call(fa4, world, q.bfloat16(), ROWS)
    with pytest.raises(AssertionError, match="page_table is not supported with cu_seqlens_k"):
        _call(fa4, world, q, ROWS, cu_seqlens_k=offsets_of(LENGTHS), seqused_k=None)
    fp8 = pages(LENGTHS, dtype=torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="FP8"):
        _call(fa4, fp8, queries(9, 4, 64, torch.float8_e4m3fn), ROWS)
