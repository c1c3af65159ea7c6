"""Decode steps of the engine in graphs: the same text as eager steps, and a reason where there are none.

Graphs are those of the CPU recorder, on `triton` in Triton's interpreter, in a process of its own: Triton
reads TRITON_INTERPRET when a kernel is decorated.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_random_model import prompts, random_checkpoint

from anyattn.cli import generate
from anyattn.core.batch import ForwardMode
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.speculative import SpeculativeEngine, make_engine
from anyattn.demo.weights import Checkpoint
from anyattn.errors import GraphError, UnknownNameError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for `benchmarks`, a folder of the repository
SMALL = EngineConfig(max_batch=3, max_context=64, page_size=16, chunk=64, backend="triton")
PARAMS = [SamplingParams(max_new_tokens=n) for n in (2, 5, 3, 4)]


def model() -> LlamaModel:
    """The first layer of the random model: the interpreter is slow."""
    whole = random_checkpoint()
    checkpoint = replace(whole, config=replace(whole.config, num_layers=1))
    with torch.backends.mkldnn.flags(enabled=False):  # the recorder can't hold packed weights
        return LlamaModel(checkpoint)


@pytest.fixture(autouse=True)
def _offered() -> None:
    if INTERPRETED:
        from anyattn.testing.interpreter import offer_triton

        offer_triton()


def recorder() -> RecorderPlatform:
    from anyattn.kernels.triton.recording import recording_launches

    return RecorderPlatform(poison=True, seams=[recording_launches])


@pytest.mark.interpreter
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-k", "graphs", __file__]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 3


@in_interpreter
def test_text_under_graphs_is_that_of_eager_steps() -> None:
    """Four requests over three rows: they join and leave, so buckets shrink and grow."""
    given = prompts(4)[2:]
    eager = Engine(model(), replace(SMALL, graphs="off")).generate(given, PARAMS)
    engine = Engine(model(), SMALL, platform=recorder())
    assert engine.graphs is not None
    assert engine.graphs_note.startswith("decode steps replay graphs of 1, 2, 3 requests (cpu-recorder, ")
    sizes = []
    runner = engine.graphs.runner
    replay = runner.replay

    def counted(batch: object, **inputs: torch.Tensor) -> object:
        sizes.append(batch.batch_size)  # type: ignore[attr-defined]
        return replay(batch, **inputs)  # type: ignore[arg-type]

    runner.replay = counted  # type: ignore[method-assign]
    found = engine.generate(given, PARAMS)
    assert [c.ids for c in found] == [c.ids for c in eager]
    assert len({c.ids for c in found}) == len(given)
    assert len(sizes) == engine.stats.of(ForwardMode.DECODE).steps > 0
    assert len(set(sizes)) > 1


@in_interpreter
def test_drafts_are_verified_beside_graphs() -> None:
    given = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9, 3, 9]]
    params = SamplingParams(max_new_tokens=4)
    plain = Engine(model(), replace(SMALL, max_batch=2, graphs="off")).generate(given, params)
    engine = make_engine(model(), replace(SMALL, max_batch=2, draft_tokens=3), platform=recorder())
    assert isinstance(engine, SpeculativeEngine)
    assert "verify steps run eagerly" in engine.graphs_note
    assert [c.ids for c in engine.generate(given, params)] == [c.ids for c in plain]
    assert engine.speculation.steps > 0


@in_interpreter
def test_graphs_of_a_bit_for_bit_run() -> None:
    """The benchmark's own comparison, small."""
    from benchmarks.graph_engine import compare

    config = replace(SMALL, max_batch=3, backend="triton")
    found = compare(model(), config, prompts(6)[2:], PARAMS, platform=recorder())
    assert found.ok
    assert found.tokens > 0
    assert (found.again.tokens, found.fresh.tokens) == (0, 0)
    assert found.again.rows == 0
    assert {size for size, _ in found.memory} == {1, 2, 3}
    assert found.same_text


@in_interpreter
def test_graphs_that_go_stale_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the capture instead of the step's: text differs, and the comparison says so."""
    from benchmarks.graph_engine import compare

    prepare = GraphRunner.prepare
    monkeypatch.setattr(
        GraphRunner, "prepare", lambda self, entry, batch, inputs: prepare(self, entry, batch, {})
    )
    found = compare(model(), replace(SMALL, max_batch=1), prompts(6)[2:3], PARAMS[:1], platform=recorder())
    assert found.fresh.rows > 0
    assert not found.ok
    assert "rows aren't those of a plan made anew" in found.lines()[-1]


@in_interpreter
@pytest.mark.model
def test_graphs_of_the_demo_model(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command, on the model's first layer."""
    from benchmarks import graph_engine

    monkeypatch.setattr(graph_engine, "load_gguf", lambda path: checkpoint)
    out = tmp_path / "out.json"
    options = "--backend triton --device cpu --layers 1 --requests 2 --tokens 3 --every 1 --json"
    assert graph_engine.main([*options.split(), str(out)]) == 0
    found = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["tokens"] > 0
    assert found["again"] == found["fresh"] == {"rows": 0, "tokens": 0, "worst": 0.0, "gap": 0.0}
    assert [size for size, _ in found["memory"]] == [2, 1]
    assert graph_engine.main(["--backend", "torch_native", *options.split()[2:], str(out)]) == 2


def test_a_backend_without_graphs_is_named() -> None:
    config = replace(SMALL, backend="torch_native")
    note = Engine(model(), config, platform=RecorderPlatform()).graphs_note
    assert "torch_native limits them" in note
    assert "host" in note
    assert "\n" not in note
    with pytest.raises(GraphError, match="torch_native can't be captured"):
        Engine(model(), replace(config, graphs="on"))


def test_a_hybrid_names_the_backend_that_decodes() -> None:
    engine = Engine(model(), replace(SMALL, backend=None, prefill="torch_native", decode="torch_native"),
                    platform=RecorderPlatform())  # fmt: skip
    assert engine.graphs is None
    assert "torch_native limits them" in engine.graphs_note


def test_on_a_cpu_nothing_is_captured_unless_asked_for() -> None:
    config = replace(SMALL, backend="torch_native")
    assert "cpu has no graphs" in Engine(model(), config).graphs_note
    assert "off" in Engine(model(), replace(config, graphs="off")).graphs_note


def test_unknown_uses_of_graphs() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'auto'"):
        Engine(model(), replace(SMALL, backend="torch_native", graphs="aut"))
    with pytest.raises(UnknownNameError, match="auto"):
        generate._graphs("yes")
