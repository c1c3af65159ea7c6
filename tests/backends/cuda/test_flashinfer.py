"""`flashinfer` for dense models, on the stand-in: what is planned, with what, how often, and for how long."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flashinfer_steps import Calls, Setting, spec, watched  # type: ignore[import-not-found]

import anyattn
from anyattn.core.groups import TableGroup
from anyattn.core.strategy import Strategy
from anyattn.errors import FeatureError
from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulating
from anyattn.testing.kit import run_item
from anyattn.testing.plan import plan_random


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with emulating("flashinfer"):
        yield watched(monkeypatch)


def _planned(calls: Calls) -> list[tuple[str, dict[str, Any]]]:
    return [(role, keywords) for role, _, _, keywords in calls.of("plan")]


def test_host_arrays_alone_reach_the_planner(calls: Calls) -> None:
    setting = Setting([spec()], host="cuda:sm120")  # a prefix is a part of its own there
    for batch in (setting.decode(30, 7), setting.extend([8, 0], [3, 5]), setting.extend([0, 0], [3, 5])):
        setting.run(batch)
    roles = [role for role, *_ in calls.of("plan")]
    assert roles == ["decode", "ragged", "paged", "ragged"]
    for role, _, args, keywords in calls.of("plan"):
        offsets = [args[0], *([args[2]] if role == "decode" else [args[1]])]
        offsets += [args[3]] if role == "paged" else []
        offsets += [keywords["seq_lens"]] if "seq_lens" in keywords else []
        assert all(t.device.type == "cpu" and t.dtype == torch.int32 for t in offsets)
    decode, paged = calls.of("plan")[0], calls.of("plan")[2]
    assert decode[2][0].tolist() == [0, 8, 10]
    assert decode[2][2].tolist() == [2, 3]
    assert decode[3]["seq_lens"].tolist() == [30, 7]
    assert paged[2][0].tolist() == [0, 3, 8]
    assert (paged[2][1].tolist(), paged[2][3].tolist()) == ([0, 2, 2], [4, 0]), "the prefix alone"


def test_planned_once_a_step_whatever_the_number_of_layers(calls: Calls) -> None:
    setting = Setting([spec(), spec(), spec(sliding_window=9), spec(sliding_window=9)])
    batch = setting.decode(30, 7)
    plan = setting.backend.init_forward_metadata(batch)
    for layer in range(4):
        setting.run(batch, layer, plan)
    assert len(calls.of("plan")) == 2
    assert len(calls.of("run")) == 2, "each slot's second layer repeats the launch of its first"


@pytest.mark.parametrize("shape", [([0, 0], [3, 20]), ([8, 30], [3, 5]), None])
def test_the_window_is_passed_on_every_path(calls: Calls, shape: Any) -> None:
    setting = Setting([spec(sliding_window=5)])
    setting.run(setting.decode(30, 7) if shape is None else setting.extend(*shape))
    ((role, keywords),) = _planned(calls)
    assert keywords["window_left"] == 4
    assert role == ("decode" if shape is None else "paged" if any(shape[0]) else "ragged")


def test_a_mask_holds_its_window(calls: Calls) -> None:
    setting = Setting([spec(sliding_window=5)], features=[anyattn.Feature.EXPLICIT_MASK])
    mask = anyattn.ExplicitMask.from_matrices([torch.ones(3, 11, dtype=torch.bool).tril(8)])
    setting.run(setting.extend([8], [3], mask=mask))
    ((role, keywords),) = _planned(calls)
    assert (role, keywords["window_left"]) == ("paged", -1)
    cells = keywords["packed_custom_mask"].shape[0]
    assert cells == 3 * (11 - 4), "keys from the page of the first visible one"


def test_strategies_follow_the_model() -> None:
    extend, verify = anyattn.ForwardMode.EXTEND, anyattn.ForwardMode.TARGET_VERIFY
    with emulating("flashinfer"):
        elsewhere = Setting([spec()], host="cuda:sm120").backend
        assert elsewhere.traits(extend).strategies == (Strategy.RAGGED, Strategy.RAGGED_MERGE, Strategy.PAGED)
        plain = Setting([spec()]).backend
        assert plain.traits(extend).strategies == (Strategy.RAGGED, Strategy.PAGED)
        assert plain.traits(verify).strategies == (Strategy.PAGED,)
        windows = Setting([spec(), spec(sliding_window=5)]).backend
        assert windows.traits(extend).strategies == (Strategy.RAGGED, Strategy.PAGED)
        fp8 = Setting([spec()], kv_dtype="float8_e4m3fn").backend
        assert fp8.traits(extend).strategies == (Strategy.PAGED,)
        sinks = Setting([spec(sinks=True)]).backend
        assert sinks.traits(extend).strategies == (Strategy.PAGED,)


def test_the_inner_kernel_is_the_rows(calls: Calls) -> None:
    setting = Setting([spec()])
    setting.run(setting.extend([0], [3]))
    setting.run(setting.decode(9))
    made = [(role, keywords["backend"]) for role, _, _, keywords in calls.of("make")]
    assert made == [("ragged", "fa3"), ("decode", "fa2")]


def test_query_head_counts_are_planned_apart(calls: Calls) -> None:
    setting = Setting([spec(), spec(num_q_heads=4)])
    batch = setting.extend([0], [6])
    plan = setting.backend.init_forward_metadata(batch)
    assert [args[2] for _, _, args, _ in calls.of("plan")] == [8, 4]
    for layer in (0, 1):
        setting.run(batch, layer, plan)
    first, second = calls.of("run")
    assert first[1] is not second[1]


def test_living_plans_keep_their_wrappers(calls: Calls) -> None:
    setting = Setting([spec()])
    first, second = setting.decode(30, 7), setting.decode(31, 9)
    one = setting.backend.init_forward_metadata(first)
    alone = setting.run(first, plan=one).clone()
    two = setting.backend.init_forward_metadata(second)
    assert len(calls.of("make")) == 2
    setting.run(second, plan=two)
    assert torch.equal(setting.run(first, plan=one), alone)
    del one, two
    gc.collect()
    for _ in range(3):
        setting.run(setting.decode(20, 8))
    assert len(calls.of("make")) == 2, "wrappers come back with their plans"


def test_no_layer_writes_where_the_library_cannot(calls: Calls) -> None:
    setting = Setting([spec()])
    batch = setting.extend([8, 0], [3, 5])
    want, lse = setting.run(batch, return_lse=True)
    room = torch.full((8, 8, 65), 7.0, dtype=torch.bfloat16)
    weights = torch.empty(8, 16)[:, ::2]
    got, got_lse = setting.run(batch, return_lse=True, out=room[..., :64], lse_out=weights)
    assert torch.equal(got, want)
    assert torch.allclose(got_lse, lse, atol=1e-4)
    assert bool((room[..., 64] == 7).all())
    assert all(c[3]["out"].is_contiguous() for c in calls.of("run"))


def test_heads_beyond_the_librarys_merge_are_merged_by_the_core(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting([spec()])
    batch = setting.extend([8, 40], [3, 5])
    want, lse = setting.run(batch, return_lse=True)
    monkeypatch.setattr("anyattn.backends.cuda.flashinfer.merge_fits", lambda *_: False)
    got, got_lse = setting.run(batch, return_lse=True)
    assert (got.float() - want.float()).abs().max() < 0.02
    assert torch.allclose(got_lse, lse, atol=1e-4)


def test_steps_without_tokens_plan_nothing(calls: Calls) -> None:
    setting = Setting([spec()])
    out = setting.run(setting.extend([8, 4], [0, 0]))
    assert out.shape == (0, 8, 64)
    assert not calls.of("plan")


def test_a_step_that_stored_its_keys_reads_the_table(calls: Calls) -> None:
    setting = Setting([spec()])
    batch = setting.extend([0], [6]).view(kv_stored=True)
    plan = setting.backend.init_forward_metadata(batch)
    with anyattn.forward_context(setting.backend, plan):
        setting.layers[0](torch.randn(6, 8, 64).bfloat16(), None, None, batch)
    assert [role for role, *_ in calls.of("run")] == ["paged"]


@pytest.mark.parametrize("version", ["0.7.2.post1", "0.6.4"])
def test_captured_shapes_are_planned_again_in_place(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", version)
    setting = Setting([spec()])
    backend = setting.backend
    backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    captured = backend.init_forward_metadata_out_graph(setting.decode(1, 1), in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    made = calls.of("make")
    assert len(made) == 1
    assert made[0][3]["use_cuda_graph"]
    address = captured.tables[TableGroup()].indices.data_ptr()
    fresh = Setting([spec()])
    for lens in ((30, 7), (2, 48)):
        later = setting.decode(*lens)
        plan = backend.init_forward_metadata_out_graph(later, captured=captured)
        backend.init_forward_metadata_in_graph(plan)
        assert torch.equal(setting.run(later, plan=plan), fresh.run(fresh.decode(*lens)))
        assert plan.tables[TableGroup()].indices.data_ptr() == address
    planned = sum(wrapper is made[0][1] for _, wrapper, _, _ in calls.of("plan"))
    assert planned == (3 if version == "0.6.4" else 1), "natively where the call is known"
    setting.run(setting.decode(5, 6))
    assert calls.of("make")[-1][3].get("use_cuda_graph") is None, "eager steps have wrappers of their own"


def test_masks_stay_out_of_captures(calls: Calls) -> None:
    setting = Setting([spec()], features=[anyattn.Feature.EXPLICIT_MASK])
    setting.backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    mask = anyattn.ExplicitMask.from_matrices([torch.ones(2, 10, dtype=torch.bool)])
    with pytest.raises(FeatureError, match="capture"):
        setting.backend.init_forward_metadata_out_graph(setting.extend([8], [2], mask=mask), in_capture=True)


@pytest.mark.parametrize("host", ["cuda:sm90", "cuda:sm120"])
def test_random_steps_agree_with_the_oracle(host: str) -> None:
    with emulating("flashinfer", host):
        subject = Subject(declared("flashinfer", "cpu", host), "cpu", host)
        results = [run_item(item, subject) for item in plan_random(subject.declared, 12, seed=5).items]
    assert [(r.item, r.why) for r in results if not r.passed] == []
