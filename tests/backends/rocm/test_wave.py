"""`wave` on a stand-in of its templates: judged by definition, what is compiled, what a graph keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from wave_stand import COMPILED, wave_installed

import anyattn
from anyattn.errors import FeatureError
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.judge import check_case, judge, run_step
from anyattn.testing.selecting import select_for
from anyattn.testing.world import World

_HOST = "rocm:gfx942"
_BASE = Case(
    prefix_lens=(0, 21, 150), extend_lens=(5, 1, 9), page_size=16, slot_layout="shuffled_pages",
    num_q_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype="bfloat16", kv_dtype="bfloat16",
    return_lse=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _wave() -> Iterator[None]:
    with wave_installed():
        yield


def _with(**fields: Any) -> Case:
    return dataclasses.replace(_BASE, **fields)


@pytest.mark.parametrize(
    "case",
    [
        _with(),
        _with(dtype="float16", kv_dtype="float16", strided=True, give_out=True, seed=1),
        _with(scale=0.3, logit_cap=1.5, flat=True, padding=2),
        _with(extend_lens=(140, 1, 2), num_q_heads=4, num_kv_heads=4),
        _with(mode="decode", extend_lens=(1, 1, 1), prefix_lens=(0, 40, 7), num_kv_heads=8, strided=True),
        _with(mode="decode", extend_lens=(1, 1, 1), scale=0.3, logit_cap=1.5, give_out=True, padding=2),
        _with(mode="mixed", extend_lens=(5, 2, 1), num_decode=1, kv="cached"),
        _with(mode="verify", extend_lens=(3, 3, 3), device_ints=True),
    ],
    ids=["extend", "half", "capped", "long", "decode_mha", "decode", "mixed_cached", "verify"],
)
def test_judged_by_definition(case: Case) -> None:
    report = check_case(case, backend="wave", host=_HOST)
    assert report.passed, report


def test_kernels_are_compiled_once_for_a_shape() -> None:
    world = World(_with(), backend="wave", host=_HOST)
    for _ in range(2):
        step = build_step(world)
        run_step(step)
        assert judge(step).passed
    assert len(COMPILED) == 1
    assert COMPILED[0].dynamic_symbols == ["N_Q", "N_KV", "S"]


def test_partial_results_of_a_graph_stay_where_they_are() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
    limits = anyattn.Limits(max_requests=4, max_tokens=8, max_context=64)
    decision = select_for(
        [spec], dtype="bfloat16", device="cpu", host=_HOST, prefill="wave", decode="wave", limits=limits
    )
    pool = anyattn.kv.create_pool(decision, num_slots=4 * decision.kv.page_size)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=64, device="cpu")
    backend = anyattn.create_backend(decision, pool, table)
    backend = getattr(backend, "decode", backend)
    backend.init_cuda_graph_state(limits)
    page = pool.page_size
    table.req_to_token[0, :40] = page + torch.arange(40)
    table.req_to_token[1, :40] = 2 * page + torch.arange(40)
    batch = anyattn.ForwardBatch.decode([0, 1], seq_lens=[1, 1], out_cache_loc=[page, 2 * page])
    plan = backend.init_forward_metadata_out_graph(batch, in_capture=True)
    (before,) = plan.private.partials.values()
    again = anyattn.ForwardBatch.decode([0, 1], seq_lens=[30, 9], out_cache_loc=[page + 29, 2 * page + 8])
    assert backend.init_forward_metadata_out_graph(again, captured=plan) is plan
    (after,) = plan.private.partials.values()
    assert [t.data_ptr() for t in before] == [t.data_ptr() for t in after]
    assert before[0].shape == (16, 2, 8, 64)


@pytest.mark.parametrize("asked", [{"sliding_window": 8}, {"sinks": True}], ids=["window", "sinks"])
def test_what_the_templates_lack_is_refused(asked: dict[str, Any]) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, **asked)
    with pytest.raises(anyattn.errors.SelectionError, match="feature"):
        anyattn.select([spec], dtype=torch.bfloat16, host=_HOST, backend="wave")


def test_log_sums_are_refused_by_name() -> None:
    world = World(_with(), backend="wave", host=_HOST)
    step = build_step(world)
    plan = world.backend.init_forward_metadata(step.batch)
    with anyattn.forward_context(world.backend, plan), pytest.raises(FeatureError, match="lse"):
        world.layer(step.q, step.k, step.v, step.batch, return_lse=True)
