"""The FlashMLA stand-ins against the oracle: conventions, refusals, traps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, pages, queries

from anyattn.testing.emulators import EmulationError, emulating

LENGTHS = [7, 130, 64]
FP8 = torch.float8_e4m3fn


@pytest.fixture(name="mla")
def _mla() -> Iterator[Any]:
    with emulating("flashmla"):
        yield importlib.import_module("flash_mla")


@pytest.fixture(name="sgl")
def _sgl() -> Iterator[Any]:
    with emulating("flashmla"):
        yield importlib.import_module("sgl_kernel.flash_mla")


def _world(lengths: list[int], dtype: torch.dtype = torch.float16) -> Pages:
    world = pages(lengths, page=64, heads=1, dim=576, dtype=dtype)
    world.values = world.keys[..., :512]
    return world


def _q(rows: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return queries(3 * rows, 16, 576, dtype).view(3, rows, 16, 576)


def _call(module: Any, world: Pages, q: torch.Tensor, meta: Any, **more: Any) -> Any:
    given: dict[str, Any] = {"softmax_scale": 0.07, "causal": True, "use_legacy": True}
    return module.flash_mla_with_kvcache(
        q, world.keys, world.table, world.lengths, 512, meta, **{**given, **more}
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_decode_and_chains(mla: Any, rows: int) -> None:
    world, q = _world(LENGTHS), _q(rows)
    out, lse = _call(mla, world, q, mla.get_mla_metadata()[0])
    want_out, want_lse = world.expected(q.reshape(-1, 16, 576), [rows] * 3, scale=0.07)
    assert out.shape == (3, rows, 16, 512)
    assert lse.shape == (3, 16, rows)
    assert close(out.reshape(-1, 16, 512), want_out)
    assert close(lse.transpose(1, 2).reshape(-1, 16), want_lse, 1e-5)


def test_rows_see_what_comes_after_them_unless_causal(mla: Any) -> None:
    world, q = _world(LENGTHS), _q(3)
    out, _ = _call(mla, world, q, mla.get_mla_metadata()[0], causal=False)
    want, _ = world.expected(q.reshape(-1, 16, 576), [3] * 3, scale=0.07, kind="cross")
    assert close(out.reshape(-1, 16, 512), want)


def test_a_request_without_keys_has_an_lse_of_plus_infinity(mla: Any) -> None:
    world = _world([0, 5, 9])
    out, lse = _call(mla, world, _q(1), mla.get_mla_metadata()[0])
    assert torch.equal(out[0], torch.zeros(1, 16, 512, dtype=torch.float16))
    assert torch.isposinf(lse[0]).all()


def test_metadata_are_of_one_step(mla: Any) -> None:
    world, q = _world(LENGTHS), _q(1)
    meta = mla.get_mla_metadata()[0]
    first, _ = _call(mla, world, q, meta)
    second, _ = _call(mla, world, q, meta)  # the next layer
    assert torch.equal(first, second)
    later = _world([n + 1 for n in LENGTHS])
    assert torch.isnan(_call(mla, later, q, meta)[0]).all()
    with pytest.raises(RuntimeError, match="must have shape"):
        _call(mla, world, _q(5), meta)


def test_fp8_needs_metadata_and_descales_of_one_number(mla: Any) -> None:
    world, q = _world(LENGTHS, FP8), _q(2, FP8)
    meta = mla.get_mla_metadata()[0]
    descales = {"descale_q": torch.tensor([0.5]), "descale_k": torch.tensor([2.0]), "is_fp8_kvcache": True}
    with pytest.raises(AssertionError, match="dense fp8 decoding needs metadata"):
        _call(mla, world, q, meta, **descales)
    made = mla.get_mla_decoding_metadata(world.lengths, 2 * 16, 1, 16, True, use_legacy=True)
    meta.tile_scheduler_metadata, meta.num_splits = made
    out, lse = _call(mla, world, q, meta, **descales)
    want_out, want_lse = world.expected(
        q.float().reshape(-1, 16, 576) * 0.5, [2] * 3, scale=0.07, k_scale=2.0, v_scale=2.0
    )
    assert out.dtype == torch.bfloat16
    assert close(out.reshape(-1, 16, 512), want_out, 8e-3)
    assert close(lse.transpose(1, 2).reshape(-1, 16), want_lse, 1e-4)
    with pytest.raises(RuntimeError, match=r"descale_k must have shape \(1\)"):
        _call(mla, world, q, meta, **{**descales, "descale_k": torch.ones(3)})


def test_what_the_library_refuses(mla: Any) -> None:
    world, q, fresh = _world(LENGTHS), _q(1), mla.get_mla_metadata
    with pytest.raises(AssertionError, match="use_legacy"):
        _call(mla, world, q, fresh()[0], use_legacy=False)
    with pytest.raises(AssertionError, match="FlashMLASchedMeta"):
        _call(mla, world, q, torch.zeros(4, 8))
    with pytest.raises(AssertionError, match="descale"):
        _call(mla, world, q, fresh()[0], descale_k=torch.ones(1))
    small = pages(LENGTHS, page=32, heads=1, dim=576)
    with pytest.raises(RuntimeError, match="page_block_size must be 64"):
        _call(mla, small, q, fresh()[0])
    with pytest.raises(EmulationError, match="sparse"):
        _call(mla, world, q, fresh()[0], indices=torch.zeros(3, 1, 64, dtype=torch.int32))
    world.lengths = world.lengths.long()
    with pytest.raises(RuntimeError, match="seqlens_k must have dtype int32"):
        _call(mla, world, q, fresh()[0])
    with emulating("flashmla", "cuda:sm100"), pytest.raises(RuntimeError, match="SM90a"):
        _call(mla, _world(LENGTHS), q, fresh()[0])


def test_sglang_has_descales_in_front_and_tensors(sgl: Any) -> None:
    world, q = _world(LENGTHS), _q(1)
    schedule, splits = sgl.get_mla_metadata(world.lengths, 16, 1)
    out, _ = sgl.flash_mla_with_kvcache(
        q, world.keys, world.table, world.lengths, 512, schedule, splits, 0.07, True
    )
    want, _ = world.expected(q.reshape(-1, 16, 576), [1] * 3, scale=0.07)
    assert close(out.reshape(-1, 16, 512), want)
    fp8, q8 = _world(LENGTHS, FP8), _q(1, FP8)
    schedule, splits = sgl.get_mla_metadata(fp8.lengths, 16, 1, 16, True)
    one = torch.ones(1)
    out, _ = sgl.flash_mla_with_kvcache(
        q8, fp8.keys, fp8.table, fp8.lengths, 512, schedule, splits, 0.07, True, one, one, True
    )
    want, _ = fp8.expected(q8.float().reshape(-1, 16, 576), [1] * 3, scale=0.07)
    assert close(out.reshape(-1, 16, 512), want, 8e-3)
