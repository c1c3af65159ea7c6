"""The profile of a decode step: intervals, kinds of kernels, random weights, and a run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.inflight import InFlight
from anyattn.demo.model import LlamaModel
from anyattn.demo.weights import Checkpoint
from benchmarks.decode_profile import SHAPES, RandomTensors, busy_seconds, kind_of, main, profile

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0), ([(1, 3)], 2), ([(4, 5), (1, 3)], 3), ([(1, 4), (2, 3)], 3), ([(1, 3), (2, 6), (6, 7)], 6)],
)
def test_busy_time_is_counted_once(spans: list[tuple[float, float]], seconds: float) -> None:
    assert busy_seconds(spans) == seconds


def test_kinds_of_kernels() -> None:
    names = ["_decode_kernel", "nvjet_tst_64x8", "Memcpy HtoD", "vectorized_elementwise_kernel"]
    assert [kind_of(name) for name in names] == ["attention", "products", "copies", "other"]


def test_random_weights_have_the_shape_of_the_model() -> None:
    config = SHAPES["tiny"]
    tensors = RandomTensors(config, torch.float32, CPU)
    assert tensors["blk.1.attn_k.weight"].shape == (config.num_kv_heads * config.head_dim, config.hidden_size)
    assert tensors["blk.0.ffn_down.weight"].shape == (config.hidden_size, config.ffn_size)
    assert len(tensors) == 0, "nothing is kept"
    assert LlamaModel(Checkpoint(config, tensors, {}), max_context=32).embedding.shape == (256, 64)


def test_a_profile_leaves_the_engine_as_it_was() -> None:
    config = SHAPES["tiny"]
    model = LlamaModel(Checkpoint(config, RandomTensors(config, torch.float32, CPU), {}), max_context=128)
    engine = Engine(model, EngineConfig(max_batch=2, backend="torch_native", prefix_reuse=False))
    wait = InFlight.wait
    found = profile(engine, "tiny", 16, 2, 4)
    assert InFlight.wait is wait
    assert "_batch" not in vars(engine)
    assert found.busy is None
    assert found.idle is None
    assert set(found.host) == {"schedule", "pages", "batch", "compute", "wait", "finish"}
    assert found.host["compute"] > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    options = ["--model", "tiny", "--device", "cpu", "--requests", "1", "--context", "8", "--steps", "4"]
    assert main([*options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["profiles"]
    assert [p["ahead"] for p in found] == [False, True]
    assert "launched ahead" in capsys.readouterr().out
