"""The tokenspeed-mla stand-in against the oracle: conventions, refusals, traps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, offsets_of, pages, queries

from anyattn.testing.emulators import emulating

LENGTHS = [7, 130, 64]


@pytest.fixture(name="mla")
def _mla() -> Iterator[Any]:
    with emulating("cutedsl_mla"):
        yield importlib.import_module("tokenspeed_mla")


def _world(
    lengths: list[int], *, page: int = 32, clean: bool = True, extra: int = 4, dtype: Any = torch.float16
) -> Pages:
    world = pages(lengths, page=page, heads=1, dim=576, clean=clean, extra=extra, dtype=dtype)
    world.values = world.keys[..., :512]
    return world


def _q(rows: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return queries(3 * rows, 16, 576, dtype).view(3, rows, 16, 576)


def _call(mla: Any, world: Pages, q: torch.Tensor, **more: Any) -> Any:
    given: dict[str, Any] = {
        "workspace_buffer": torch.zeros(1 << 27, dtype=torch.int8), "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "block_tables": world.table, "seq_lens": world.lengths, "max_seq_len": 256,
        "softmax_scale": 0.07, "return_lse": True,
    }  # fmt: skip
    return mla.tokenspeed_mla_decode(q, world.keys[:, :, 0], **{**given, **more})


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_and_chains_with_a_base_2_lse(mla: Any, rows: int) -> None:
    world, q = _world(LENGTHS), _q(rows)
    out, lse = _call(mla, world, q)
    want_out, want_lse = world.expected(q.reshape(-1, 16, 576), [rows] * 3, scale=0.07)
    assert out.shape == (3, rows, 16, 512)
    assert lse.shape == (3, rows, 16)
    assert close(out.reshape(-1, 16, 512), want_out)
    assert close(lse.reshape(-1, 16) * math.log(2), want_lse, 1e-5)
    alone = _call(mla, world, q, return_lse=False)
    assert torch.equal(alone, out)


def test_windows_are_radii_and_as_wide_as_the_chain(mla: Any) -> None:
    world, q = _world(LENGTHS), _q(3)
    out, _ = _call(mla, world, q, window_left=4)
    want, _ = world.expected(q.reshape(-1, 16, 576), [3] * 3, scale=0.07, window=5)
    assert close(out.reshape(-1, 16, 512), want)
    with pytest.raises(ValueError, match="window_left"):
        _call(mla, world, q, window_left=1)


def test_tiles_are_loaded_whole_and_page_0_with_them(mla: Any) -> None:
    q = _q(1)
    narrow = _world(LENGTHS, extra=0)
    narrow.table = narrow.table.contiguous()
    out, _ = _call(mla, narrow, q)
    assert close(out.reshape(-1, 16, 512), narrow.expected(q.reshape(-1, 16, 576), [1] * 3, scale=0.07)[0])
    narrow.keys[0] = torch.nan
    assert torch.isnan(_call(mla, narrow, q)[0]).any()
    assert torch.isnan(_call(mla, _world(LENGTHS, clean=False), q)[0]).any()


def test_empty_requests(mla: Any) -> None:
    out, lse = _call(mla, _world([0, 5, 9]), _q(1))
    assert torch.equal(out[0], torch.zeros(1, 16, 512, dtype=torch.float16))
    assert torch.isneginf(lse[0]).all()


def test_fp8_scales_are_in_the_softmax_and_output_scales(mla: Any) -> None:
    fp8 = torch.float8_e4m3fn
    world, q = _world(LENGTHS, dtype=fp8), _q(1, fp8)
    out, _ = _call(mla, world, q, softmax_scale=0.07 * 2.0, output_scale=2.0)
    want, _ = world.expected(q.float().reshape(-1, 16, 576), [1] * 3, scale=0.07, k_scale=2.0, v_scale=2.0)
    assert out.dtype == torch.bfloat16
    assert close(out.reshape(-1, 16, 512), want, 8e-3)


def test_what_the_library_refuses(mla: Any) -> None:
    world, q = _world(LENGTHS), _q(1)
    with pytest.raises(AssertionError, match=r"torch\.int8"):
        _call(mla, world, q, workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="too small"):
        _call(mla, world, q, workspace_buffer=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(AssertionError, match="must match query dtype"):
        _call(mla, world, q.bfloat16())
    with pytest.raises(ValueError, match="max_seq_len"):
        _call(mla, world, q, max_seq_len=0)
    with pytest.raises(ValueError, match="page_size=1"):
        _call(mla, _world(LENGTHS, page=1), q)
    with emulating("cutedsl_mla", "cuda:sm90"), pytest.raises(ValueError, match="unsupported device"):
        _call(mla, world, q)


def test_prefill_is_ragged_and_bfloat16(mla: Any) -> None:
    rows, keys = [3, 1, 5], [5, 1, 8]
    q, k, v = queries(9, 4, 192), queries(14, 4, 192), queries(14, 4, 128)
    out = mla.tokenspeed_mla_prefill(
        q, k, v, torch.tensor(keys), offsets_of(keys), 8, 3, 0.07, cum_seq_lens_q=offsets_of(rows)
    )
    slots = [list(range(5)), [5], list(range(6, 14))]
    world = Pages(k[:, None], v[:, None], torch.zeros(3, 1), torch.zeros(3), slots)
    assert out.dtype == torch.bfloat16
    assert close(out, world.expected(q, rows, scale=0.07)[0], 8e-3)
