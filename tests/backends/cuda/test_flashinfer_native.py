"""Decode wrappers planned again by the native planner: when they are, when not; nothing goes stale."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flashinfer_steps import Calls, Setting, spec, watched  # type: ignore[import-not-found]

import anyattn
from anyattn.backends.cuda.flashinfer_native import READ_VERSIONS
from anyattn.testing.emulators import emulating

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor cores": ({}, {}),
    "CUDA cores": ({"num_q_heads": 2}, {}),
    "window": ({"sliding_window": 9}, {}),
    "window on CUDA cores": ({"num_q_heads": 2, "sliding_window": 9}, {}),
    "logit cap": ({"logit_cap": 5.0, "num_q_heads": 2}, {}),
    "scale": ({"scale": 0.4}, {}),
    "fp8": ({}, {"kv_dtype": "float8_e4m3fn"}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with emulating("flashinfer"):
        yield watched(monkeypatch)


def _plans(calls: Calls) -> int:
    return len(calls.of("plan"))


def _run(setting: Setting, batch: anyattn.ForwardBatch, layer: int = 0, plan: Any = None) -> torch.Tensor:
    """Attend, and leave the pool as it was: every step finds the same KV."""
    caches = [cache for i in range(len(setting.specs)) for cache in setting.pool.caches(i)]
    before = [cache.clone() for cache in caches]
    out: torch.Tensor = setting.run(batch, layer, plan)
    for cache, was in zip(caches, before, strict=True):
        cache.copy_(was)
    return out.clone()


def _alone(setting: Setting, lens: tuple[int, ...], **options: Any) -> torch.Tensor:
    """What a backend gives that plans for the first time."""
    other = Setting(setting.specs, **options)
    return _run(other, other.decode(*lens))


@pytest.mark.parametrize("model", MODELS)
def test_other_lengths_of_a_shape_are_planned_natively(calls: Calls, model: str) -> None:
    changes, options = MODELS[model]
    setting = Setting([spec(**changes)], **options)
    _run(setting, setting.decode(30, 7))
    for lens in ((31, 8), (2, 48), (1, 1), (30, 7)):
        before = _plans(calls)
        out = _run(setting, setting.decode(*lens))
        assert _plans(calls) == before, "not by the library's own plan"
        assert torch.equal(out, _alone(setting, lens, **options)), lens


@pytest.mark.parametrize("renewed", [False, True])
def test_another_batch_size_is_planned_from_scratch(calls: Calls, renewed: bool) -> None:
    setting = Setting([spec()])
    if not renewed:  # else each size has plans of its own, and wrappers with them
        setting.backend._eager._usable = False
    again = 0 if renewed else 1
    sizes = (((30, 7), 1), ((30, 7, 5), 1), ((31, 8, 6), 0), ((9, 9), again), ((10, 10), 0), ((4,), 1))
    for lens, fresh in sizes:
        before = _plans(calls)
        out = _run(setting, setting.decode(*lens))
        assert _plans(calls) - before == fresh, lens
        assert torch.equal(out, _alone(setting, lens))


def test_slots_keep_their_wrappers(calls: Calls) -> None:
    setting = Setting([spec(), spec(sliding_window=9), spec(num_q_heads=4)])
    for step, lens in enumerate(((30, 7), (31, 8), (12, 33), (48, 1))):
        batch, before = setting.decode(*lens), _plans(calls)
        plan = setting.backend.init_forward_metadata(batch)
        assert _plans(calls) - before == (3 if step < 2 else 0), "the plan before is still held"
        other = Setting(setting.specs)
        theirs = other.decode(*lens)
        for layer in range(3):
            want = _run(other, theirs, layer)
            assert torch.equal(_run(setting, batch, layer, plan), want), (step, layer)


def test_two_living_plans_of_a_shape(calls: Calls) -> None:
    setting = Setting([spec()])
    steps = [(30, 7), (31, 9), (5, 6)]
    plans = []
    for lens in steps:
        batch = setting.decode(*lens)
        plans.append((batch, setting.backend.init_forward_metadata(batch)))
    for (batch, plan), lens in zip(reversed(plans), reversed(steps), strict=True):
        assert torch.equal(_run(setting, batch, plan=plan), _alone(setting, lens))
    del batch, plan
    plans.pop(1)  # its wrapper comes back and is planned again beside two living ones
    gc.collect()
    before = _plans(calls)
    later = setting.decode(40, 3)
    again = setting.backend.init_forward_metadata(later)
    assert _plans(calls) == before
    assert torch.equal(_run(setting, later, plan=again), _alone(setting, (40, 3)))
    for (batch, plan), lens in zip(plans, (steps[0], steps[2]), strict=True):
        assert torch.equal(_run(setting, batch, plan=plan), _alone(setting, lens))


def test_steps_of_other_modes_in_between(calls: Calls) -> None:
    setting = Setting([spec()])
    _run(setting, setting.decode(30, 7))
    _run(setting, setting.extend([8, 0], [3, 5]))
    before = _plans(calls)
    out = _run(setting, setting.decode(31, 8))
    assert _plans(calls) == before
    assert torch.equal(out, _alone(setting, (31, 8)))


@pytest.mark.parametrize("version", ["0.7.4", "0.6.2", None])
def test_versions_that_were_not_read_plan_from_scratch(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    library = sys.modules["flashinfer"]
    if version is None:
        monkeypatch.delattr(library, "__version__")
    else:
        monkeypatch.setattr(library, "__version__", version)
    assert version not in READ_VERSIONS
    setting = Setting([spec()])
    for step in range(1, 4):
        _run(setting, setting.decode(29 + step, 7))
        assert _plans(calls) == step


def test_a_wrapper_without_a_native_planner_plans_from_scratch(calls: Calls) -> None:
    setting = Setting([spec()])
    setting.backend._eager._usable = False  # a plan that is kept has what its wrapper had
    _run(setting, setting.decode(30, 7))
    wrapper = calls.of("make")[0][1]
    del wrapper._cached_module  # as of a backend that has none: trtllm-gen, cudnn
    setting.backend._setup.again.__init__("0.7.2.post1", setting.backend._setup.wrappers.staging)
    setting.backend._setup.again.remember(wrapper, (0, 2), None)
    before = _plans(calls)
    _run(setting, setting.decode(31, 8))
    assert _plans(calls) == before + 1


def test_a_plan_that_fails_leaves_nothing_behind(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting([spec()])
    setting.backend._eager._usable = False
    _run(setting, setting.decode(30, 7))
    wrapper = calls.of("make")[0][1]

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(wrapper), "plan", refuse)
        with pytest.raises(RuntimeError, match="no room"):
            _run(setting, setting.decode(30, 7, 5))
    before = _plans(calls)
    out = _run(setting, setting.decode(31, 8))
    assert _plans(calls) == before + 1, "the wrapper may be in any state"
    assert torch.equal(out, _alone(setting, (31, 8)))


def test_replays_take_the_native_planner_alone(calls: Calls) -> None:
    setting = Setting([spec(), spec(sliding_window=9)])
    backend = setting.backend
    backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    captured = backend.init_forward_metadata_out_graph(setting.decode(1, 1), in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    eager = setting.decode(20, 21)
    alive = backend.init_forward_metadata(eager)
    for lens in ((30, 7), (2, 48), (3, 48)):
        later, before = setting.decode(*lens), _plans(calls)
        plan = backend.init_forward_metadata_out_graph(later, captured=captured)
        assert _plans(calls) == before
        backend.init_forward_metadata_in_graph(plan)
        other = Setting(setting.specs)
        theirs = other.decode(*lens)
        for layer in range(2):
            assert torch.equal(_run(setting, later, layer, plan), _run(other, theirs, layer))
    assert torch.equal(_run(setting, eager, 0, alive), _alone(setting, (20, 21))), "an eager plan beside it"


def test_a_plan_that_nobody_holds_is_planned_on_its_own_wrappers(calls: Calls) -> None:
    setting = Setting([spec(), spec(num_q_heads=4)])
    places, made = set(), 0
    for step, lens in enumerate(((30, 7), (31, 8), (12, 33), (48, 1))):
        batch = setting.decode(*lens)
        plan = setting.backend.init_forward_metadata(batch)
        places.add((id(plan), *(id(run.keys) for run in plan.private.runs)))
        made = len(calls.of("make")) if step == 0 else made
        own = [c[1] for c in calls.of("make")][:made]
        assert [run.keys for run in plan.private.runs] == own
        other = Setting(setting.specs)
        theirs = other.decode(*lens)
        for layer in range(2):
            want = _run(other, theirs, layer)
            assert torch.equal(_run(setting, batch, layer, plan), want), (step, layer)
        del plan
    assert len(places) == 1


def test_a_native_planner_that_refuses_leaves_a_plan_that_is_planned_in_whole(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting([spec(), spec(num_q_heads=4)])
    _run(setting, setting.decode(30, 7))
    module = calls.of("make")[1][1]._cached_module

    def refuse(*args: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(module, "plan", refuse, raising=False)
        with pytest.raises(RuntimeError, match="no room"):
            _run(setting, setting.decode(33, 8))
    for lens in ((33, 8), (40, 2), (41, 3)):
        batch, other = setting.decode(*lens), Setting(setting.specs)
        theirs = other.decode(*lens)
        plan = setting.backend.init_forward_metadata(batch)
        for layer in range(2):
            assert torch.equal(_run(setting, batch, layer, plan), _run(other, theirs, layer))
