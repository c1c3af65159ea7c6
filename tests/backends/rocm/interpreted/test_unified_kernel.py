"""AITER's real Triton kernel as a second opinion: on our adapter's calls, and beside our own kernels."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from unified_source import sources, unified_attention

from anyattn.core.batch import ForwardMode
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.emulators import emulating
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.judge import judge, run_step
from anyattn.testing.world import World

_HOST = "rocm:gfx942"
_BASE = Case(
    prefix_lens=(0, 37, 70), extend_lens=(5, 1, 9), page_size=16, slot_layout="shuffled_pages",
    num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype="float16", kv_dtype="float16",
    return_lse=False, sinks=True,
)  # fmt: skip
_CASES = {
    "extend": _BASE,
    "capped window": dataclasses.replace(_BASE, window=20, logit_cap=1.5, scale=0.3, strided=True),
    "verify": dataclasses.replace(_BASE, mode="verify", extend_lens=(3, 1, 4), page_size=32),
    "decode": dataclasses.replace(_BASE, mode="decode", extend_lens=(1, 1, 1), padding=1, give_out=True),
    "split decode": dataclasses.replace(
        _BASE,
        mode="decode",
        prefix_lens=(600, 37),
        extend_lens=(1, 1),
        page_size=64,
        head_dim=128,
        v_head_dim=128,
    ),
    "decode in a window": dataclasses.replace(_BASE, mode="decode", extend_lens=(1, 1, 1), window=4),
}


@pytest.fixture(scope="module", name="real")
def _real() -> Callable[..., Any]:
    root = sources()
    if root is None:
        pytest.skip("the sources of amd-aiter aren't installed")
    return unified_attention(root)


@pytest.mark.parametrize("name", _CASES)
def test_the_adapters_call_is_right(
    real: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = _CASES[name]
    with emulating("aiter"):
        module = importlib.import_module("aiter.ops.triton.unified_attention")
        ran = []

        def unified(**given: Any) -> Any:
            ran.append(given)
            return real(**given)

        unified.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "unified_attention", unified)
        world = World(case, backend="aiter", host=_HOST)
        step = build_step(world)
        run_step(step)
        report = judge(step)
    assert ran
    assert report.passed, report


@pytest.mark.parametrize("name", _CASES)
def test_our_kernels_agree_with_it(real: Callable[..., Any], name: str) -> None:
    offer_triton()
    case = dataclasses.replace(_CASES[name], padding=0)
    step = build_step(World(case, backend="triton"))
    run_step(step)
    assert step.out is not None
    for cache in (step.world.pool.key_cache(0), step.world.pool.value_cache(0)):
        cache.nan_to_num_()  # theirs multiplies what stands behind a request's last token by zero
    theirs = torch.empty_like(step.out)
    _call(real, step, theirs)
    error = (theirs.double() - step.out.double()).abs().max() / step.out.double().abs().max()
    assert error < 4e-3, error


def _call(real: Callable[..., Any], step: Step, out: torch.Tensor) -> None:
    """The step's untrimmed table, by hand: nothing of our compiler."""
    world, case, batch = step.world, step.world.case, step.batch
    lens = batch.seq_lens.int()
    offsets = torch.zeros(lens.shape[0] + 1, dtype=torch.int32)
    offsets[1:] = batch.extend_seq_lens.cumsum(0)
    pages = -(-int(lens.max()) // case.page_size)
    width = (pages + 3) // 4 * 4
    columns = (torch.arange(width) * case.page_size).clamp_max(world.table.max_context - 1)
    slots = world.table.req_to_token[batch.req_pool_indices][:, columns]
    blocks = torch.where(columns < lens[:, None], slots // case.page_size, torch.zeros_like(slots)).int()
    spec = case.spec()
    window = (-1, -1) if case.window is None else (case.window - 1, 0)
    longest = 1 if batch.forward_mode is ForwardMode.DECODE else int(batch.extend_seq_lens.max())
    real(
        q=step.q, k=world.pool.key_cache(0), v=world.pool.value_cache(0), out=out, cu_seqlens_q=offsets,
        max_seqlen_q=longest, seqused_k=lens, max_seqlen_k=int(lens.max()), softmax_scale=spec.scale,
        causal=True, window_size=window, block_table=blocks.contiguous(), softcap=case.logit_cap or 0.0,
        q_descale=None, k_descale=None, v_descale=None, sinks=world.sinks,
    )  # fmt: skip
