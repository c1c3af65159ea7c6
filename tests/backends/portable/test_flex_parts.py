"""Keys in several parts, and pools that are longer than the kernel's offsets reach."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from anyattn.backends.portable import flex_attention, flex_gather
from anyattn.backends.portable.flex_attention import FlexAttention
from anyattn.core.plan import TableForm, TableKind
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.judge import judge, run_step
from anyattn.testing.world import World

_SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 32, "seed": 9}
_STEPS: dict[str, dict[str, Any]] = {
    "decode": {"mode": "decode", "prefix_lens": (3, 63, 64, 200, 127), "extend_lens": (1,) * 5},
    "extend": {"prefix_lens": (0, 47, 130, 64), "extend_lens": (150, 1, 40, 0)},
    "bidirectional": {"kind": "bidirectional", "prefix_lens": (0, 130), "extend_lens": (70, 3)},
    "verify": {"mode": "verify", "prefix_lens": (61, 130), "extend_lens": (5, 3)},
    "encoder": {"kind": "encoder_only", "prefix_lens": (0, 0), "extend_lens": (70, 200), "kv": "arguments"},
    "written by the call": {"prefix_lens": (40, 130), "extend_lens": (90, 3), "kv": "arguments"},
}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_PART", 64)


def _world(name: str, page: int | None, **fields: Any) -> World:
    case = Case(page_size=32, slot_layout="shuffled_pages", **{**_SHAPE, **_STEPS[name], **fields})
    world = World(case, backend="flex_attention")
    if page is not None:  # as GPUs are offered it; eager kernels multiply by zero what they mask
        for cache in (world.pool.key_cache(0), world.pool.value_cache(0)):
            cache.nan_to_num_(nan=37.0)
        form = TableForm(TableKind.BLOCK_TABLE, kernel_page=page)
        world.backend = FlexAttention(dataclasses.replace(world.backend.config, form=form))
    return world


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("name", _STEPS)
@pytest.mark.parametrize("page", [None, 16])
def test_parts_add_up_to_the_whole(
    page: int | None, name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page is not None and name in ("encoder", "written by the call"):
        pytest.skip("paged keys are read from the pool")
    calls, original = [], flex_attention.block_mask
    monkeypatch.setattr(flex_attention, "block_mask", lambda *a: calls.append(a) or original(*a))
    world = _world(name, page, window=window, sinks=True, logit_cap=20.0)
    report = judge(run_step(build_step(world)))
    assert report.passed, str(report)
    assert len(calls) > 1 or window == 5


@pytest.mark.parametrize("name", ["decode", "extend", "verify"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_pool_beyond_the_reach_is_gathered_from_its_pages(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's offsets have 32 bits: the same step in a pool that ends past them (vllm#50427)."""
    world = _world(name, None, window=window)
    caches = [cache(0) for cache in (world.pool.key_cache, world.pool.value_cache)]
    assert flex_gather.reaches(caches)
    monkeypatch.setattr(flex_gather, "REACH", max(cache.numel() for cache in caches) - 1)
    assert not flex_gather.reaches(caches)
    form = TableForm(TableKind.BLOCK_TABLE, kernel_page=16)
    world.backend = backend = FlexAttention(dataclasses.replace(world.backend.config, form=form))
    reads = []
    gather = world.pool.gather
    monkeypatch.setattr(world.pool, "gather", lambda *a: reads.append(a) or gather(*a))
    report = judge(run_step(build_step(world)))
    assert report.passed, str(report)
    assert reads
    assert isinstance(backend, FlexAttention)


def test_parts_of_many_requests_stay_within_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests of 8 KV heads once gathered 4 GiB of K and 4 of V for a call, and as much for copies."""
    assert flex_attention._ROOM < flex_gather.REACH
    monkeypatch.setattr(flex_attention, "_ROOM", 5 * 2 * 32 * 48)
    seen: list[torch.Tensor] = []
    rows = flex_gather.Gathered.rows
    monkeypatch.setattr(flex_gather.Gathered, "rows", lambda *a: seen.append(rows(*a)) or seen[-1])
    report = judge(run_step(build_step(_world("decode", None))))
    assert report.passed, str(report)
    assert {x.shape[2] for x in seen} == {48, 16}
    assert all(x.numel() <= 5 * 2 * 32 * 48 for x in seen)
