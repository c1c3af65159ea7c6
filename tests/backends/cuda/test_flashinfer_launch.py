"""Launches of a decode wrapper given again: the same results, never those of another plan, table or layer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer_steps import Calls, Setting, spec, watched  # type: ignore[import-not-found]

import anyattn
from anyattn.backends.cuda.flashinfer_launch import Launch, repeats_launches
from anyattn.testing.emulators import emulating

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor cores": ({}, {}),
    "CUDA cores": ({"num_q_heads": 2}, {}),
    "window": ({"sliding_window": 9}, {}),
    "logit cap": ({"logit_cap": 5.0}, {}),
    "logit cap on CUDA cores": ({"logit_cap": 5.0, "num_q_heads": 2}, {}),
    "scale": ({"scale": 0.4}, {}),
    "fp8": ({}, {"kv_dtype": "float8_e4m3fn"}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with emulating("flashinfer"):
        yield watched(monkeypatch)


def _runs(calls: Calls) -> int:
    return len(calls.of("run"))


def _ordinary(setting: Setting, **options: Any) -> Setting:
    """The same model whose calls all go through `wrapper.run`."""
    other = Setting(setting.specs, **options)
    other.backend._setup.__dict__["repeats_launches"] = False
    return other


@pytest.mark.parametrize("model", MODELS)
def test_layers_and_steps_behind_the_first_repeat_its_launch(calls: Calls, model: str) -> None:
    changes, options = MODELS[model]
    setting = Setting([spec(**changes)] * 3, **options)
    other = _ordinary(setting, **options)
    for step, lens in enumerate(((30, 7), (31, 8), (33, 8), (12, 40))):
        batch, theirs = setting.decode(*lens), other.decode(*lens)
        plan, peer = setting.backend.init_forward_metadata(batch), other.backend.init_forward_metadata(theirs)
        for layer in range(3):
            before = _runs(calls)
            out = setting.run(batch, layer, plan)
            first = layer == 0 and (step == 0 or model == "window")  # whose plans aren't kept
            assert _runs(calls) - before == first, (step, layer)
            assert torch.equal(out, other.run(theirs, layer, peer)), (step, layer)
            for cache, want in zip(setting.pool.caches(layer), other.pool.caches(layer), strict=True):
                assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8)), "stored once, as given"
        del plan, peer


def test_slots_have_launches_of_their_own(calls: Calls) -> None:
    setting = Setting([spec(), spec(sliding_window=9), spec(num_q_heads=4)] * 2)
    other = _ordinary(setting)
    for lens in ((30, 7), (41, 2)):
        batch, theirs = setting.decode(*lens), other.decode(*lens)
        plan, peer = setting.backend.init_forward_metadata(batch), other.backend.init_forward_metadata(theirs)
        for layer in (5, 0, 1, 2, 3, 4):
            assert torch.equal(setting.run(batch, layer, plan), other.run(theirs, layer, peer)), layer
        del plan, peer
    assert _runs(calls) == 2 * 3 + 12, "no plan is kept where tables are trimmed"


def test_another_plan_or_table_is_not_taken_for_the_first(calls: Calls) -> None:
    setting = Setting([spec()] * 2)
    setting.backend._eager._usable = False  # wrappers go from plan to plan, each with tables of its own
    other = _ordinary(setting)
    held: list[tuple[Any, Any, Any]] = []
    for lens in ((30, 7), (31, 8), (5, 44), (30, 7, 9), (9, 9)):
        batch, theirs = setting.decode(*lens), other.decode(*lens)
        held.append((batch, theirs, setting.backend.init_forward_metadata(batch)))
        if len(held) == 3:
            del held[0]
            gc.collect()
        for index in range(len(held)):
            ours, their, peer = *held[index][:2], other.backend.init_forward_metadata(held[index][1])
            for layer in (0, 1, 1):
                assert torch.equal(setting.run(ours, layer, held[index][2]), other.run(their, layer, peer))


def test_a_captured_plan_repeats_launches_on_its_own_buffers(calls: Calls) -> None:
    setting = Setting([spec(), spec()])
    backend, other = setting.backend, _ordinary(setting)
    backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    captured = backend.init_forward_metadata_out_graph(setting.decode(1, 1), in_capture=True)
    for lens in ((30, 7), (2, 48), (2, 48), (3, 48)):
        later, theirs = setting.decode(*lens), other.decode(*lens)
        plan = backend.init_forward_metadata_out_graph(later, captured=captured)
        backend.init_forward_metadata_in_graph(plan)
        peer = other.backend.init_forward_metadata(theirs)
        for layer in range(2):
            assert torch.equal(setting.run(later, layer, plan), other.run(theirs, layer, peer)), lens


def test_tensors_that_kernels_cannot_read_or_write_take_the_ordinary_path(calls: Calls) -> None:
    setting = Setting([spec()])
    other = _ordinary(setting)
    batch, theirs = setting.decode(30, 7), other.decode(30, 7)
    plan, peer = setting.backend.init_forward_metadata(batch), other.backend.init_forward_metadata(theirs)
    setting.run(batch, 0, plan)
    wide = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    odd = torch.zeros(2 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 64)
    dense = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    want = other.run(theirs, 0, peer)
    for out, runs in ((wide[..., :64], 1), (odd, 1), (dense, 0)):
        before = _runs(calls)
        assert setting.run(batch, 0, plan, out=out) is out
        assert torch.equal(out, want)
        assert _runs(calls) - before == runs
    before = _runs(calls)
    out, lse = setting.run(batch, 0, plan, return_lse=True)
    assert torch.equal(out, want)
    assert torch.isfinite(lse).all()
    assert _runs(calls) == before + 1
    q, k = torch.randn(2, 8, 128).bfloat16(), torch.randn(2, 2, 64).bfloat16()
    with anyattn.forward_context(setting.backend, plan):
        strided = setting.layers[0](q[..., :64], k, k, batch)
    assert _runs(calls) == before + 2
    with anyattn.forward_context(setting.backend, plan):
        assert torch.equal(setting.layers[0](q[..., :64].contiguous(), k, k, batch), strided)
    assert _runs(calls) == before + 2


def test_scaled_and_sink_layers_take_the_ordinary_path(calls: Calls) -> None:
    for changes, options in (({"sinks": True}, {}), ({}, {"kv_dtype": "float8_e4m3fn"})):
        setting = Setting([spec(**changes)], **options)
        if options:
            setting.pool.set_scales(0, 0.5, 2.0)
        batch = setting.decode(30, 7)
        plan, before = setting.backend.init_forward_metadata(batch), _runs(calls)
        for _ in range(3):
            setting.run(batch, 0, plan)
        assert _runs(calls) - before == 3, changes


@pytest.mark.parametrize("name", ["FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP"])
def test_calls_that_are_to_be_written_down_are_made(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert repeats_launches()
    monkeypatch.setenv(name, "1")
    assert not repeats_launches()
    setting = Setting([spec()])
    batch = setting.decode(30, 7)
    plan = setting.backend.init_forward_metadata(batch)
    for times in range(1, 4):
        setting.run(batch, 0, plan)
        assert _runs(calls) == times


class _Wrapper:
    """`run` gives its module `extra` launches more than one; the module writes down what it is given."""

    def __init__(self, extra: int = 0) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.extra = extra
        self._cached_module: Any = SimpleNamespace(paged_run=lambda *args: self.given.append(args), plan=None)
        self._plan_info: Any = [1]
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = torch.zeros(3), torch.zeros(4)
        self._paged_kv_last_page_len_buf: Any = torch.zeros(2)

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        assert self._cached_module.plan is None, "the rest of the module is there"
        table = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        for _ in range(1 + self.extra):
            self._cached_module.paged_run(7, self._plan_info, q, *cache, *table, out, None, 0.5)


def _tensors() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    return torch.zeros(1), (torch.zeros(2), torch.zeros(3)), torch.zeros(4)


def test_a_launch_takes_the_tensors_and_the_plan_of_its_time() -> None:
    wrapper = _Wrapper()
    module, launch = wrapper._cached_module, Launch(wrapper)
    launch.run(*_tensors())
    assert launch.known
    assert wrapper._cached_module is module
    for _ in range(2):
        wrapper._plan_info = [2]
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = torch.ones(3), torch.ones(4)
        wrapper._paged_kv_last_page_len_buf = torch.ones(2)
        q, cache, out = _tensors()
        launch.again(q, cache, out)
        wrapper.run(q, cache, out=out)
        ours, own = wrapper.given[-2:]
        assert all(a is b for a, b in zip(ours, own, strict=True))


def test_a_launch_keeps_no_tensor_of_a_call_alive() -> None:
    wrapper = _Wrapper()
    launch, given = Launch(wrapper), _tensors()
    places = [weakref.ref(x) for x in (given[0], *given[1], given[2])]
    launch.run(*given)
    launch.again(*given)
    wrapper.given.clear()
    del given
    gc.collect()
    assert [place() for place in places] == [None] * 4


@pytest.mark.parametrize("extra", [-1, 1])
def test_what_launches_nothing_or_more_is_run_each_time(extra: int) -> None:
    wrapper = _Wrapper(extra)
    launch = Launch(wrapper)
    for times in range(1, 3):
        launch.run(*_tensors())
        assert not launch.known
        assert len(wrapper.given) == times * (1 + extra)


def test_a_tensor_that_is_given_twice_is_not_told_apart() -> None:
    wrapper = _Wrapper()
    launch, (q, cache, _) = Launch(wrapper), _tensors()
    launch.run(q, cache, q)
    assert not launch.known
    wrapper._paged_kv_last_page_len_buf = None
    other = Launch(wrapper)
    other.run(*_tensors())
    assert not other.known, "what isn't there can't be found"


def test_a_run_that_fails_leaves_the_module_in_place() -> None:
    wrapper = _Wrapper()
    module = wrapper._cached_module = SimpleNamespace(plan=1)
    launch = Launch(wrapper)
    with pytest.raises(AssertionError, match="rest of the module"):
        launch.run(*_tensors())
    assert wrapper._cached_module is module
    assert not launch.known
