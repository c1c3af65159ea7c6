"""Calls of decode steps of one shape: kept without their tensors, and never those of another step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_stands import SGLANG, TOKENSPEED, VLLM, backend_of, decode, spec  # type: ignore[import-not-found]

import anyattn
from anyattn.backends.cuda.flash_plan import GroupCall
from anyattn.testing.emulators import emulating

BUILDS = [("fa3", TOKENSPEED), ("fa3", SGLANG), ("fa3", VLLM), ("fa4", "cuda:sm100")]


def _same(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """The same arguments in the same order, tensors by identity."""
    if one is None or other is None:
        return one is other
    pairs = zip(one.items(), other.items(), strict=True)
    return all(a == b and (x is y if isinstance(x, torch.Tensor) else x == y) for (a, x), (b, y) in pairs)


def _alike(one: GroupCall, other: GroupCall) -> bool:
    return (
        one.function is other.function
        and one.table is other.table
        and one.causal is other.causal
        and _same(one.arguments, other.arguments)
        and _same(one.schedule, other.schedule)
        and one.fresh is None is other.fresh
    )


@pytest.mark.parametrize(("name", "host"), BUILDS)
def test_every_step_has_the_calls_that_it_would_have_alone(name: str, host: str) -> None:
    with emulating(name, host):
        backend = backend_of(name, host, [spec(), spec(sliding_window=20), spec(scale=0.3)])
        planner = backend.planner
        alive = []
        for count, length in ((3, 40), (3, 41), (2, 41), (3, 90), (3, 90), (5, 17), (3, 40)):
            plan = backend.init_forward_metadata(decode(count, length))
            alive.append(plan)
            groups = backend.config.groups.plan_groups
            fresh = [planner._call(plan, group, in_capture=False) for group in groups]
            assert all(map(_alike, plan.private.calls, fresh)), (count, length)
        for index, plan in enumerate(alive):
            for call, table in zip(plan.private.calls, plan.tables.values(), strict=False):
                others = [other for i, other in enumerate(alive) if i != index]
                mine = {id(x) for x in call.arguments.values() if isinstance(x, torch.Tensor)}
                theirs = {
                    id(x) for other in others for c in other.private.calls for x in c.arguments.values()
                }
                assert mine
                assert mine.isdisjoint(theirs), "no step shares a tensor with another"
                assert table is not None


def test_no_tensor_of_a_step_is_kept() -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        plan = backend.init_forward_metadata(decode(3))
        backend.init_forward_metadata(decode(3))
        (kept,) = backend.planner._decodes.values()
        values = [*kept.arguments.values(), *(kept.schedule or {}).values()]
        assert not any(isinstance(value, torch.Tensor) for value in values)
        assert {name for name, _ in kept.places} <= plan.private.calls[0].arguments.keys()


def test_other_modes_and_captures_make_theirs_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        backend.init_cuda_graph_state(anyattn.Limits(8, 64, 128, 8))
        made = []
        real = backend.planner._call
        monkeypatch.setattr(
            backend.planner, "_call", lambda *args, **options: made.append(options) or real(*args, **options)
        )
        for _ in range(2):
            backend.init_forward_metadata(decode(3))
        assert len(made) == 1
        backend.init_forward_metadata_out_graph(decode(3), in_capture=True)
        assert [options["in_capture"] for options in made] == [False, True]
        backend.init_forward_metadata(anyattn.ForwardBatch.extend([0], [0], [3], [16, 17, 18]))
        assert len(made) == 3


def test_a_tensor_that_is_not_of_the_step_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("fa3", TOKENSPEED):
        backend = backend_of("fa3", TOKENSPEED, [spec()])
        planner, real = backend.planner, backend.planner._call

        def with_another(*args: Any, **options: Any) -> GroupCall:
            call: GroupCall = real(*args, **options)
            call.arguments["q_descale"] = torch.ones(1)
            return call

        monkeypatch.setattr(planner, "_call", with_another)
        planner.step(backend.init_forward_metadata(decode(3)), in_capture=False)
        assert not planner._decodes


@pytest.mark.parametrize(("name", "host"), BUILDS)
def test_a_plan_that_nobody_holds_takes_the_next_step(name: str, host: str) -> None:
    with emulating(name, host):
        backend, other = (backend_of(name, host, [spec(), spec(scale=0.3)]) for _ in range(2))
        seen = set()
        for count, length in ((3, 40), (3, 41), (3, 42), (2, 42), (3, 90), (3, 91)):
            batch = decode(count, length)
            plan = backend.init_forward_metadata(batch)
            seen.add(id(plan.private))
            for call in plan.private.calls:
                assert call.table is next(iter(plan.tables.values()))
                made = call.scheduled.get(call.function.names.get("metadata", ""))
                assert (made is None) == (call.schedule is None)
            fresh = other.init_forward_metadata(decode(count, length))
            for mine, theirs in zip(plan.private.calls, fresh.private.calls, strict=True):
                for given, wanted in ((mine.arguments, theirs.arguments), (mine.scheduled, theirs.scheduled)):
                    assert given.keys() == wanted.keys()
                    for argument, value in given.items():
                        want = wanted[argument]
                        alike = torch.equal(value, want) if isinstance(value, torch.Tensor) else value == want
                        assert alike, (argument, count, length)
            del plan, fresh, call
        assert len(seen) < 6, "some steps took an earlier one's place"
