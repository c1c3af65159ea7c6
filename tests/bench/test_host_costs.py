"""Host cost and metadata cost: recipes compute what the backends do, and limits are judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anyattn.testing.emulators import emulating
from benchmarks import decode_profile, flashinfer_variants, graph_engine, graph_step, host_cost, metadata_cost
from benchmarks.direct import RECIPES, NoRecipe, Shape, Stage
from benchmarks.host_cost import Cost, HostTimer, check_alike
from benchmarks.metadata_cost import Preparation

CPU = torch.device("cpu")
SMALL = Shape(requests=3, length=37, layers=2, num_q=8, num_kv=2, dim=64)
LATENT = Shape(requests=2, length=70, layers=2, num_q=64, mla=True)


def test_torch_native_is_called_alike() -> None:
    stage = Stage("torch_native", replace(SMALL, dtype=torch.float32), CPU)
    check_alike(stage, RECIPES["torch_native"](stage))


@pytest.mark.parametrize(
    ("name", "shape"), [("flashinfer", SMALL), ("flashinfer", LATENT), ("fa3", SMALL), ("flashmla", LATENT)]
)
def test_libraries_are_called_alike(name: str, shape: Shape) -> None:
    """On emulated libraries: the recipe's call gives what the backend gives."""
    with emulating(name) as emulator:
        stage = Stage(name, shape, CPU, host=emulator.host)
        recipe = RECIPES[name](stage)
        check_alike(stage, recipe)
        for step in range(len(stage.batches)):
            if recipe.plan is not None:
                recipe.plan(step)
        check_alike(stage, recipe)  # planning other steps on the side leaves the call as it was


def test_a_direct_call_that_does_less_is_found() -> None:
    stage = Stage("torch_native", replace(SMALL, dtype=torch.float32), CPU)
    lazy = replace(RECIPES["torch_native"](stage), call=lambda layer: torch.zeros_like(stage.q))
    with pytest.raises(AssertionError):
        check_alike(stage, lazy)


def test_steps_differ_and_their_pages_fit() -> None:
    stage = Stage("torch_native", replace(SMALL, dtype=torch.float32), CPU)
    lengths = [tuple(lens.tolist()) for lens in stage.host_lens]
    assert len(set(lengths)) == len(lengths)
    assert lengths[0] == (37, 37, 37)
    for step, lens in enumerate(lengths):
        pages = [-(-length // stage.page) for length in lens]
        assert stage.indptr(step).tolist() == [0, pages[0], pages[0] + pages[1], sum(pages)]
        assert stage.indices(step).numel() == sum(pages)


@pytest.mark.parametrize(("name", "shape"), [("triton", LATENT), ("fa3", LATENT), ("flashmla", SMALL)])
def test_shapes_without_a_recipe(name: str, shape: Shape) -> None:
    stage = Stage("torch_native", replace(shape, dtype=torch.float32), CPU)
    with pytest.raises(NoRecipe):
        RECIPES[name](stage)


def test_host_timer_runs_so_many_calls() -> None:
    from anyattn.bench.harness import Candidate

    ran: list[int] = []
    timer = HostTimer(CPU, layers=4)
    candidate = Candidate("a", [lambda: ran.append(1)])
    assert timer.calls_for(candidate, 1.0) == 1
    assert timer.sample(candidate, 3) > 0
    assert len(ran) == 3


def measured(**fields: float | bool | None) -> Cost:
    base = Cost("a", "m", "d", "w", 30.0, 20.0, 10.0, (9.0, 11.0), 5.0, 5.0, 1.0, judged=True)
    return replace(base, **fields)


def prepared(backend: str = "triton", **fields: object) -> Preparation:
    base = Preparation(backend, 256, 50.0, (49.0, 51.0), None, None, 0.0, "", judged=True)
    return replace(base, **fields)


@pytest.mark.parametrize(
    ("fields", "ok"),
    [
        ({}, True),
        ({"over_us": 12.1}, False),
        ({"graph_ratio": 1.021}, False),
        ({"graph_ratio": None}, True),
        ({"over_us": 99.0, "judged": False}, True),
    ],
)
def test_limits_of_a_call(fields: dict[str, float], ok: bool) -> None:
    cost = measured(**fields)
    assert cost.ok is ok
    assert ("FAIL" in str(cost)) is not ok


@pytest.mark.parametrize(
    ("found", "faults"),
    [
        (prepared(), 0),
        (prepared(host_us=61.0), 1),
        (prepared(host_us=61.0, requests=64), 0),
        (prepared(copies=2.0), 1),
        (prepared(waits="called a synchronizing CUDA operation"), 1),
        (prepared("torch_native", copies=2.0, host_us=900.0), 0),
        (prepared("flashinfer", host_us=200.0, own_plan_us=190.0, plan_ratio=1.05), 0),
        (prepared("flashinfer", host_us=200.0, own_plan_us=160.0, plan_ratio=1.25), 1),
        (prepared("fa3", host_us=99.0, own_plan_us=49.0, plan_ratio=2.02), 0),
        (prepared("fa3", host_us=110.0, own_plan_us=49.0, plan_ratio=2.24), 1),
        (prepared("fa3", host_us=61.0), 1),
        (prepared(host_us=61.0, judged=False), 0),
    ],
)
def test_limits_of_a_preparation(found: Preparation, faults: int) -> None:
    assert len(found.faults) == faults
    assert found.row().endswith(" ok") is (found.judged and not faults)


@pytest.mark.parametrize(("main", "key"), [(host_cost.main, "costs"), (metadata_cost.main, "preparations")])
def test_commands(
    main: Callable[[list[str]], int], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    shape = ["--device", "cpu", "--length", "24", "--layers", "1", "--requests", "2", "--rounds", "2"]
    assert main(["--backends", "torch_native,flashinfer", "--json", str(out), *shape]) == 0
    found = json.loads(out.read_text())
    (row,) = found[key]
    assert row["backend"] == "torch_native"
    assert row["judged"] is False
    (reason,) = found["left_out"].values()
    assert "flashinfer" in reason
    assert "torch_native" in capsys.readouterr().out
    assert main(["--backends", "flashinfer", *shape]) == 2


def test_unknown_backends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host_cost.main(["--backends", "flashinfre"])
    assert "did you mean 'flashinfer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "action"),
    [
        (host_cost.main, []), (metadata_cost.main, []), (graph_step.main, []), (graph_engine.main, []),
        (decode_profile.main, []), (flashinfer_variants.main, ["build"]),
    ],
)  # fmt: skip
def test_a_device_that_is_not_here_is_told(
    main: Callable[[list[str]], int], action: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main([*action, "--device", "npu:7"])
    except SystemExit as end:  # a parser's way of saying so
        status = end.code
    assert status == 2
    said = capsys.readouterr().err
    assert "asked: npu:7" in said
    assert "Next: " in said
