"""Steps under graphs: both loops compute the same, on stand-ins of the libraries, and limits are judged.

Stand-ins read values on the host, so no recorder takes them: the graphs here run their body again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.testing.emulators import emulating
from benchmarks import graph_step
from benchmarks.direct import NoRecipe, Shape, Stage
from benchmarks.direct.graphed import GRAPHED, Steps, graphs_of
from benchmarks.direct.launches import count_launches, kind_of
from benchmarks.graph_cells import STEPS, Cell, Measured, table
from benchmarks.graph_step import Ours, check_alike, launches, main, measure_cell

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
BASE = Shape(layers=2, num_q=4, num_kv=2, dim=64)
LATENT = Shape(layers=2, num_q=64, mla=True)


class BodyAgain(GraphObject):
    def capture(self, body: Callable[[], None]) -> None:
        body()
        self.replay = body  # type: ignore[method-assign]

    def replay(self) -> None:
        raise AssertionError("not captured")


class NoFence(Fence):
    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


class EagerPlatform(GraphPlatform):
    """A replay is the captured body, run again."""

    name = "eager"

    def new_graph(self) -> GraphObject:
        return BodyAgain()

    def new_fence(self) -> Fence:
        return NoFence()

    def synchronize(self) -> None: ...

    def memory_bytes(self) -> int:
        return 0


@pytest.fixture
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_step, "STEPS", 4)


@pytest.mark.usefixtures("_few_steps")
@pytest.mark.parametrize("name", ["flashinfer", "fa3", "flashmla"])
def test_a_cell_on_stand_ins(name: str) -> None:
    base = LATENT if name == "flashmla" else BASE
    with emulating(name) as emulator:
        found = measure_cell(
            name, Cell(2, 20), base, CPU, rounds=1, host=emulator.host, platform=EagerPlatform()
        )
        counted = launches(name, Cell(2, 20), base, CPU, host=emulator.host, platform=EagerPlatform())
    assert (found.requests, found.context, found.layers, found.replays) == (2, 20, base.layers, 4)
    assert min(found.step_us, found.bare_us, found.host_us, found.launch_us) > 0
    assert not found.judged
    assert found.row().endswith("| not judged |")
    direct = name in GRAPHED
    assert (found.direct is not None) is direct
    assert all((x is not None) is direct for x in (found.direct_us, found.over_direct, found.direct_host_us))
    assert set(counted) == ({"step", "direct"} if direct else {"step"})


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_a_direct_loop_that_forgets_its_lengths_is_found(name: str) -> None:
    with emulating(name) as emulator:
        stage = Stage(name, Cell(2, 20).shape(BASE), CPU, host=emulator.host)
        steps = Steps(stage, 20, STEPS)
        ours = Ours(stage, steps, EagerPlatform(), BASE.layers)
        direct = GRAPHED[name](stage, steps, EagerPlatform(), BASE.layers)
        check_alike(ours, direct)
        stuck = replace(direct, step=lambda number: direct.step(0))
        with pytest.raises(AssertionError):
            check_alike(ours, stuck)


def test_shapes_without_a_direct_loop(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage("torch_native", replace(LATENT, requests=2, length=30, dtype=torch.float32), CPU)
    steps = Steps(stage, 20, 4)
    for name in GRAPHED:
        with pytest.raises(NoRecipe):
            GRAPHED[name](stage, steps, EagerPlatform(), 2)
    with emulating("flashinfer") as emulator:
        found = measure_cell(
            "flashinfer", Cell(2, 24), LATENT, CPU, rounds=1, host=emulator.host, platform=EagerPlatform()
        )
    assert found.direct is None
    assert "no direct loop" in capsys.readouterr().err


def test_steps_grow_by_a_token_around_the_context() -> None:
    stage = Stage("torch_native", replace(Cell(3, 40).shape(BASE), dtype=torch.float32), CPU)
    steps = Steps(stage, 40, STEPS)
    lengths = [int(lens[0]) for lens in steps.lens]
    assert lengths == list(range(33, 49))
    table_of = stage.table.req_to_token
    for number, length in enumerate(lengths):
        assert steps.loc[number].tolist() == table_of[:3, length - 1].tolist()
        offsets, pages, last = steps.pages(number)
        count = -(-length // stage.page)
        assert offsets.tolist() == [0, count, 2 * count, 3 * count]
        assert pages.tolist() == stage.pages[:, :count].flatten().tolist()
        assert (count - 1) * stage.page + int(last[0]) == length


@pytest.mark.parametrize(
    ("cell", "layers"),
    [(Cell(1, 8192), 32), (Cell(64, 8192), 32), (Cell(256, 8192), 8), (Cell(16, 1024), 32)],
)
def test_few_layers_where_all_would_be_too_large(cell: Cell, layers: int) -> None:
    shape = cell.shape(Shape())
    assert shape.layers == layers
    assert 2 * shape.layers * cell.requests * cell.context * 8 * 128 * 2 <= 100e9


def measured(**fields: object) -> Measured:
    base = Measured(
        backend="triton", method="m", requests=16, context=1024, layers=32, step_us=102.0, bare_us=100.0,
        over_bare=1.02, host_us=50.0, host_cold_us=50.0, launch_us=10.0, direct="d", direct_us=101.0,
        direct_host_us=60.0, over_direct=1.01, replays=112, judged=True,
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({}, 0),
        ({"over_bare": 1.031}, 1),
        ({"over_bare": 1.5, "requests": 1}, 0),
        ({"host_us": 60.1}, 1),
        ({"host_us": 60.1, "backend": "flashinfer"}, 0),
        ({"host_us": 60.1, "backend": "fa3", "requests": 1}, 1),
        ({"over_direct": 1.021}, 1),
        ({"over_direct": None, "direct": None, "direct_us": None}, 0),
        ({"over_bare": 2.0, "host_us": 99.0, "over_direct": 1.5}, 3),
        ({"over_bare": 2.0, "host_us": 99.0, "over_direct": 1.5, "judged": False}, 0),
    ],
)
def test_limits(fields: dict[str, object], faults: int) -> None:
    found = measured(**fields)
    assert len(found.faults) == faults
    assert found.row().endswith("| ok |") is (found.judged and not faults)


def test_the_table_is_markdown() -> None:
    lines = table([measured(), measured(direct_us=None, over_direct=None)]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("name", "on_device", "kind"),
    [
        ("cudaLaunchKernel", False, "kernels launched"),
        ("cuLaunchKernelEx", False, "kernels launched"),
        ("cudaGraphLaunch", False, "graph launches"),
        ("cudaMemcpyAsync", False, "copies started"),
        ("cudaStreamSynchronize", False, "host waits"),
        ("aten::copy_", False, None),
        ("Memcpy HtoD (Pinned -> Device)", True, "copies to the device"),
        ("Memcpy DtoH (Device -> Pinned)", True, "copies to the host"),
        ("Memcpy DtoD (Device -> Device)", True, "copies on the device"),
        ("Memset (Device)", True, "fills on the device"),
        ("_decode_kernel", True, "kernels"),
    ],
)
def test_kinds_of_events(name: str, on_device: bool, kind: str | None) -> None:
    assert kind_of(name, on_device) == kind


def test_counting_on_a_cpu_finds_no_launches() -> None:
    called: list[int] = []
    assert count_launches(called.append, [3, 4], CPU) == {}
    assert called == [3, 3, 4]


def test_the_command_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, markdown = tmp_path / "out.json", tmp_path / "out.md"
    options = ["--device", "cpu", "--cells", "2x24", "--layers", "1", "--rounds", "1", "--json", str(out)]
    assert main(["--backends", "torch_native,flashinfer", "--markdown", str(markdown), *options]) == 2
    found = json.loads(out.read_text())
    assert found["cells"] == []
    assert set(found["left_out"]) == {"torch_native 2x24", "flashinfer 2x24"}
    assert "can't be captured" in found["left_out"]["torch_native 2x24"]
    assert markdown.read_text().startswith("| backend |")
    assert graphs_of(CPU).name == "cpu-recorder"


@pytest.mark.interpreter
def test_the_command_in_the_interpreter(tmp_path: Path) -> None:
    """Triton's kernels on the recorder, in a process that has the variable from its start."""
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["--device", "cpu", "--cells", "2x12", "--layers", "1", "--rounds", "1", "--json", str(out)]
    program = f"from benchmarks import graph_step as g; g.STEPS = 4; raise SystemExit(g.main({options}))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    (cell,) = found["cells"]
    assert (cell["backend"], cell["requests"], cell["judged"]) == ("triton", 2, False)
    assert cell["step_us"] > 0 < cell["bare_us"]
    assert "triton" in found["launches"]
