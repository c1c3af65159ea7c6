"""`hpc_ops` on its stand-in: task maps once a step and one plan each, lengths, scales, refusals."""

from __future__ import annotations

import gc
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn.errors import BackendBuildError, SelectionError
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.emulators import emulating
from anyattn.testing.judge import judge, run_step
from anyattn.testing.world import World

_HOST = "cuda:sm90"
_SHAPE: dict[str, Any] = {
    "page_size": 64, "num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "v_head_dim": 128,
    "dtype": "bfloat16", "kv_dtype": "bfloat16", "return_lse": False,
}  # fmt: skip


@pytest.fixture(name="hpc")
def _hpc() -> Iterator[Any]:
    with emulating("hpc_ops"):
        yield importlib.import_module("hpc")


def _calls(monkeypatch: pytest.MonkeyPatch, hpc: Any, name: str) -> list[dict[str, Any]]:
    """Arguments of every call of a function of the library, by name; backends are made afterwards."""
    made: list[dict[str, Any]] = []
    original = getattr(hpc, name)
    signature = inspect.signature(original)

    def watched(*args: Any, **keywords: Any) -> Any:
        made.append(dict(signature.bind(*args, **keywords).arguments))
        return original(*args, **keywords)

    watched.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(hpc, name, watched)
    return made


def _world(**fields: Any) -> World:
    case = Case(**{**_SHAPE, "mode": "decode", "prefix_lens": (70, 3), "extend_lens": (1, 1), **fields})
    return World(case, backend="hpc_ops", host=_HOST)


def test_lengths_are_assigned_once_a_step_and_count_the_new_token(
    hpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assigned, ran = (
        _calls(monkeypatch, hpc, n) for n in ("assign_attention_decode_task", "attention_decode_bf16")
    )
    world = _world()
    step = build_step(world)
    plan = world.backend.init_forward_metadata(step.batch)
    for _ in range(3):
        run_step(step, plan)
    assert judge(step).passed
    assert len(assigned) == 1
    assert (assigned[0]["num_seq_kvcache"].tolist(), assigned[0]["mtp"]) == ([71, 4], 1)
    assert assigned[0]["new_kv_included"] is True
    assert [call["mtp"] for call in ran] == [0, 0, 0]
    assert all(call["task_map"] is assigned[0]["task_map"] for call in ran)


def test_each_plan_has_a_map_while_it_is_alive(hpc: Any) -> None:
    world = _world()
    first, second = (world.backend.init_forward_metadata(build_step(world).batch) for _ in range(2))
    addresses = [next(iter(p.private.maps.values())).data_ptr() for p in (first, second)]
    assert addresses[0] != addresses[1]
    del first
    gc.collect()
    third = world.backend.init_forward_metadata(build_step(world).batch)
    assert next(iter(third.private.maps.values())).data_ptr() == addresses[0]


def test_prefill_gets_whole_lengths_and_a_bound(hpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _calls(monkeypatch, hpc, "attention_with_kvcache_prefill_bf16")
    world = _world(mode="extend", prefix_lens=(70, 0), extend_lens=(3, 40), give_out=True, strided=True)
    step = run_step(build_step(world))
    assert judge(step).passed
    assert ran[0]["seqlens_kvcache"].tolist() == [73, 40]
    assert (ran[0]["cu_seqlens_q"].tolist(), ran[0]["max_seqlens_q"]) == ([0, 3, 43], 40)
    assert ran[0]["output"].is_contiguous()


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_8_bit_scales_are_counted_once(hpc: Any, mode: str) -> None:
    heads = {"num_q_heads": 64, "num_kv_heads": 8, "kv_dtype": "float8_e4m3fn"}
    scales = {"k_scale": (0.5, 2.0) * 4, "v_scale": (0.25, 1.0, 2.0, 0.5) * 2}
    extend = (1, 1) if mode == "decode" else (9, 2)
    step = run_step(build_step(_world(mode=mode, extend_lens=extend, **heads, **scales)))
    report = judge(step)
    assert report.passed, str(report)


def test_a_library_without_task_maps_is_refused_by_name(hpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpc, "attention_decode_bf16", lambda q, kcache, vcache, block_ids, lengths: None)
    with pytest.raises(BackendBuildError, match="attention_decode_bf16 with task_map"):
        _world()
    monkeypatch.delattr(hpc, "attention_decode_bf16")
    with pytest.raises(BackendBuildError, match="6e2eced"):
        _world()


@pytest.mark.parametrize(
    "fields", [{"head_dim": 64, "v_head_dim": 64}, {"num_q_heads": 2}, {"page_size": 16}, {"window": 5}]
)
def test_what_the_kernels_lack_is_refused_before_a_build(hpc: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(SelectionError, match="hpc_ops"):
        _world(**fields)


def test_more_requests_than_a_map_holds(hpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_limits", lambda self: anyattn.Limits(2049, 4096, 128))
    with pytest.raises(BackendBuildError, match="2048"):
        _world()


def test_no_query_at_all_runs_no_kernel(hpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _calls(monkeypatch, hpc, "attention_with_kvcache_prefill_bf16")
    step = run_step(build_step(_world(mode="extend", prefix_lens=(4, 9), extend_lens=(0, 0))))
    assert step.out is not None
    assert step.out.shape[0] == 0
    assert not ran
    assert torch.isfinite(step.out).all()
