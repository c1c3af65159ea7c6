"""Schedules that are left where they are: only while they are right, in the workspace that holds them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer_steps import Setting, spec  # type: ignore[import-not-found]

import anyattn
from anyattn.backends.cuda.flashinfer_native import DecodeAgain, DecodeSizes, Prepared
from anyattn.backends.cuda.flashinfer_plan import KeptPages, PageArrays
from anyattn.backends.cuda.flashinfer_staging import PIECE, Staging
from anyattn.testing.emulators import emulating
from anyattn.testing.emulators.flashinfer_native import DecodeModule

HALF = torch.bfloat16


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of every native plan."""
    calls: list[tuple[Any, ...]] = []
    real = DecodeModule.plan

    def plan(self: DecodeModule, *args: Any) -> Any:
        calls.append(args)
        return real(self, *args)

    with emulating("flashinfer"):
        monkeypatch.setattr(DecodeModule, "plan", plan)
        yield calls


def _run(setting: Setting, batch: anyattn.ForwardBatch, layer: int = 0, plan: Any = None) -> torch.Tensor:
    caches = [cache for i in range(len(setting.specs)) for cache in setting.pool.caches(i)]
    before = [cache.clone() for cache in caches]
    out: torch.Tensor = setting.run(batch, layer, plan).clone()
    for cache, was in zip(caches, before, strict=True):
        cache.copy_(was)
    return out


def _alone(setting: Setting, lens: tuple[int, ...], layer: int = 0) -> torch.Tensor:
    other = Setting(setting.specs)
    return _run(other, other.decode(*lens), layer)


@pytest.mark.parametrize("changes", [{}, {"num_q_heads": 2}], ids=["tensor cores", "CUDA cores"])
def test_a_schedule_stands_until_a_request_begins_a_page(
    made: list[tuple[Any, ...]], changes: dict[str, Any]
) -> None:
    setting = Setting([spec(**changes)])  # pages of 4
    _run(setting, setting.decode(30, 6))
    begun = {(31, 7): 1, (32, 8): 0, (33, 8): 1, (34, 5): 0, (33, 9): 1, (29, 13): 1, (5, 33): 1}
    for lens, plans in begun.items():  # the first native plan is one in any case
        made.clear()
        out = _run(setting, setting.decode(*lens))
        assert len(made) == plans, lens
        assert torch.equal(out, _alone(setting, lens)), lens


def test_graphs_of_a_slot_plan_again_where_another_one_did(made: list[tuple[Any, ...]]) -> None:
    setting = Setting([spec()])
    backend = setting.backend
    backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    captured = [
        backend.init_forward_metadata_out_graph(setting.decode(*(1,) * size), in_capture=True)
        for size in (3, 2)
    ]
    lens = {3: (30, 7, 5), 2: (30, 7)}

    def replay(index: int) -> int:
        later = setting.decode(*lens[3 - index])
        made.clear()
        plan = backend.init_forward_metadata_out_graph(later, captured=captured[index])
        plans = len(made)
        backend.init_forward_metadata_in_graph(plan)
        assert torch.equal(_run(setting, later, 0, plan), _alone(setting, lens[3 - index]))
        return plans

    assert [replay(index) for index in (0, 0, 1, 1, 0, 1, 1)] == [1, 0, 1, 0, 1, 1, 0]


def test_a_capture_in_between_takes_the_workspace(made: list[tuple[Any, ...]]) -> None:
    setting = Setting([spec()])
    backend = setting.backend
    backend.init_cuda_graph_state(anyattn.Limits(4, 96, 64, 8))
    first = backend.init_forward_metadata_out_graph(setting.decode(1, 1), in_capture=True)
    for between in (False, True, False):
        if between:
            backend.init_forward_metadata_out_graph(setting.decode(1, 1, 1), in_capture=True)
        later = setting.decode(30, 7)
        plan = backend.init_forward_metadata_out_graph(later, captured=first)
        backend.init_forward_metadata_in_graph(plan)
        assert torch.equal(_run(setting, later, 0, plan), _alone(setting, (30, 7)))


def test_a_wrapper_lent_to_another_plan_reads_its_tables(made: list[tuple[Any, ...]]) -> None:
    setting = Setting([spec()])
    setting.backend._eager._usable = False  # every plan is a new one, on the wrapper of the last
    _run(setting, setting.decode(30, 6))
    for lens, rows in (((31, 7), (0, 1)), ((31, 7), (2, 3))):
        gc.collect()
        made.clear()
        prefix = [n - 1 for n in lens]
        batch = anyattn.ForwardBatch.decode(list(rows), list(lens), setting.slots(rows, prefix, [1, 1]))
        out = _run(setting, batch)
        other = Setting(setting.specs)
        assert torch.equal(out, _run(other, batch)), rows
    assert len(made) == 1, "the other backend's own; here the schedule of the same lengths stands"


def test_a_plan_that_failed_left_no_schedule(
    made: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting([spec()])
    _run(setting, setting.decode(30, 6))

    def refuse(self: DecodeModule, *args: Any) -> None:
        raise RuntimeError("no room")

    _run(setting, setting.decode(40, 6))
    with monkeypatch.context() as patch:
        patch.setattr(DecodeModule, "plan", refuse)
        with pytest.raises(RuntimeError, match="no room"):
            setting.backend.init_forward_metadata(setting.decode(41, 6))
    made.clear()
    assert torch.equal(_run(setting, setting.decode(40, 6)), _alone(setting, (40, 6)))
    assert len(made) == 2, "both backends: what the refused plan wrote isn't known"


class _Wrapper:
    """What `DecodeAgain` looks at; `plans` holds the arguments of the native planner."""

    is_cuda_graph_enabled = False
    _plan_info: Any = None

    def __init__(self, room: int = PIECE, size: int = 2 * PIECE) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self.room = room
        self._float_workspace_buffer = torch.zeros(16, dtype=torch.uint8)
        self._int_workspace_buffer = torch.zeros(size, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(size, dtype=torch.uint8)
        self._cached_module = SimpleNamespace(plan=self._planned)

    def _planned(self, *args: Any) -> int:
        self.plans.append(args)
        if args[1].numel() < self.room:
            raise RuntimeError("Buffer overflow when allocating memory")
        return len(self.plans)


class _Events:
    """A recorder whose stream can be chosen; no stream at all with None."""

    def __init__(self) -> None:
        self.stream: int | None = 7

    def new_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def shared(self) -> int | None:
        return self.stream

    def record(self, event: Any) -> None: ...

    def record_on(self, handle: int, event: Any) -> bool:
        return True


def _again(wrapper: _Wrapper, inner: str, events: _Events | None) -> tuple[DecodeAgain, Prepared, KeptPages]:
    again = DecodeAgain("0.7.2", Staging(events))  # type: ignore[arg-type]
    again.remember(wrapper, (0, 2), DecodeSizes(True, inner, (8, 2, 4), 64, -1, 0.0, (HALF, HALF)))
    known = again.prepared(wrapper, (0, 2))
    assert known is not None
    assert again.prepared(wrapper, (0, 3)) is None
    return again, known, KeptPages(2, 4)


@pytest.mark.parametrize(("inner", "plans"), [("fa2", 1), ("fa3", 2)])
def test_fa3_lists_lengths(inner: str, plans: int) -> None:
    wrapper = _Wrapper()
    again, known, pages = _again(wrapper, inner, _Events())
    for lens in ([30, 6], [31, 7], [31, 7]):
        pages.take(torch.tensor(lens))
        again.plan(wrapper, known, pages)
    assert len(wrapper.plans) == plans


def test_a_schedule_copied_on_another_stream_is_made_again() -> None:
    wrapper, events = _Wrapper(), _Events()
    again, known, pages = _again(wrapper, "fa2", events)
    pages.take(torch.tensor([30, 6]))
    seen = []
    for stream in (7, 7, 8, 8, None, None):
        events.stream = stream
        again.plan(wrapper, known, pages)
        seen.append(len(wrapper.plans))
    assert seen == [1, 1, 2, 2, 3, 4], "streams that can't be told apart are taken for others"


def test_the_library_s_own_plan_ends_a_schedule() -> None:
    wrapper = _Wrapper()
    again, known, pages = _again(wrapper, "fa2", _Events())
    pages.take(torch.tensor([30, 6]))
    again.plan(wrapper, known, pages)
    again.forget(wrapper)
    assert again.prepared(wrapper, (0, 2)) is None
    again.plan(wrapper, known, pages)
    assert len(wrapper.plans) == 2


def test_a_schedule_too_large_for_a_piece_is_planned_in_the_wrapper_s_memory() -> None:
    wrapper = _Wrapper(room=PIECE + 1)
    again, known, pages = _again(wrapper, "fa2", _Events())
    for step, lens in enumerate(([30, 6], [40, 6], [50, 6])):
        pages.take(torch.tensor(lens))
        again.plan(wrapper, known, pages)
        assert wrapper._plan_info == 2 + step, "one refusal alone"
        spaces = [args[1].numel() for args in wrapper.plans]
        assert spaces == [PIECE] + [2 * PIECE] * (1 + step)
        assert wrapper.plans[-1][2].numel() == 2 * PIECE


def test_refusals_of_both_are_raised() -> None:
    wrapper = _Wrapper(room=3 * PIECE)
    again, known, pages = _again(wrapper, "fa2", _Events())
    pages.take(torch.tensor([30, 6]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="overflow"):
            again.plan(wrapper, known, pages)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [1, 16, 24])
def test_kept_arrays_are_those_of_a_plan_from_scratch(dtype: torch.dtype, page: int) -> None:
    kept, draw = KeptPages(5, page), torch.Generator().manual_seed(page)
    at = kept.indptr.data_ptr(), kept.lens.data_ptr()
    for _ in range(3):
        lens = torch.randint(0, 100, (5,), generator=draw).to(dtype)
        kept.take(lens)
        fresh = PageArrays(lens, page)
        assert torch.equal(kept.indptr, fresh.indptr)
        assert torch.equal(kept.lens, fresh.lens)
        assert kept.stamp(False) == bytes(fresh.indptr.view(torch.uint8).tolist())
        assert kept.stamp(True) != kept.stamp(False)
    assert at == (kept.indptr.data_ptr(), kept.lens.data_ptr())
