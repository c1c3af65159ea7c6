"""The package's own tests: run them in an environment that has it installed, `pytest tests`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from anyattn_lumen.detection import look

import anyattn
from anyattn import api
from anyattn.core.graph.runner import GraphRunner
from anyattn.detect import plugins
from anyattn.detect.sources import Sources

SPEC = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)


def decide(host: str, **options: object) -> anyattn.Decision:
    return anyattn.select(SPEC, dtype="bfloat16", host=host, **options)  # type: ignore[arg-type]


def test_the_records_are_read_without_torch_or_the_driver() -> None:
    code = (
        "import sys; from anyattn.detect import plugins; found = plugins()\n"
        "print(found.faults, sorted(set(sys.modules) & {'torch', 'anyattn_lumen.driver'}))\n"
        "print(found.platform('lumen').targets, found.backends['lumen_flash'].origin)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["() []", "('lumen:l1', 'lumen:l2') anyattn-lumen 0.1.0"]


def test_every_entry_point_was_admitted() -> None:
    own = {p.name for group in ("backends", "platforms") for p in entry_points(group=f"anyattn.{group}")}
    assert own >= {"lumen", "lumen_flash", "lumen_stream"}
    assert not plugins().faults


@pytest.mark.parametrize(("chip", "decode"), [("l1", "lumen_flash"), ("l2", "lumen_stream")])
def test_each_chip_gets_its_backends(chip: str, decode: str) -> None:
    decision = decide(f"lumen:{chip}")
    assert (decision.prefill.backend, decision.decode.backend) == ("lumen_flash", decode)
    assert decision.prefill.built
    assert decision.kv.page_size % 16 == 0


def test_what_nobody_declares_goes_to_the_reference() -> None:
    """Verification of drafts is in neither record; plain torch serves every platform."""
    assert decide("lumen:l1").phase(anyattn.core.capabilities.Phase.VERIFY).backend == "torch_native"
    sinks = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, sinks=True)
    assert anyattn.select(sinks, dtype="bfloat16", host="lumen:l1").decode.backend == "torch_native"


def test_a_refusal_names_what_would_do() -> None:
    with pytest.raises(anyattn.errors.SelectionError, match="lumen_flash") as caught:
        decide("lumen:l1", decode="lumen_stream")
    assert "architecture" in str(caught.value)


def test_chips_are_found_in_sysfs(tmp_path: Path) -> None:
    for number, chip in enumerate(("L2", "l1", "l9")):
        folder = tmp_path / f"sys/class/lumen/lumen{number}"
        folder.mkdir(parents=True)
        (folder / "chip").write_text(f"{chip}\n")
    found = look(Sources(root=tmp_path, environ={}))
    assert [device.arch for device in found.devices] == ["l2", "l1"]
    assert found.present == 3
    assert "l9" in found.notes[0]
    assert not look(Sources(root=tmp_path / "nothing", environ={})).devices


def test_a_captured_decode_step_equals_an_eager_one() -> None:
    limits = anyattn.Limits(max_requests=4, max_tokens=64, max_context=128)
    decision = decide("lumen:l1", limits=limits)
    pool = anyattn.kv.create_pool(decision, num_slots=512)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=128, device="cpu")
    backend = anyattn.create_backend(decision, pool, table)
    layer = anyattn.AttentionLayer(SPEC, layer_id=0)
    torch.manual_seed(0)
    pool.key_cache(0).normal_()
    pool.value_cache(0).normal_()
    page = pool.page_size
    table.req_to_token[0, :40] = torch.arange(page, page + 40)
    table.req_to_token[1, :40] = torch.arange(3 * page, 3 * page + 40)

    def step(length: int) -> anyattn.ForwardBatch:
        slots = [page + length - 1, 3 * page + length - 1]
        return anyattn.ForwardBatch.decode([0, 1], seq_lens=[length, length], out_cache_loc=slots)

    inputs = {
        "q": torch.zeros(4, 8, 64, dtype=torch.bfloat16),
        "k": torch.zeros(4, 2, 64, dtype=torch.bfloat16),
        "v": torch.zeros(4, 2, 64, dtype=torch.bfloat16),
    }

    def body(batch: anyattn.ForwardBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return layer(q, k, v, batch)

    runner = GraphRunner(backend, body, api.graph_platform("lumen", "cpu"), limits=limits, inputs=inputs)
    runner.capture(anyattn.ForwardMode.DECODE)
    for length in (17, 33):
        q, k, v = (torch.randn_like(x[:2]) for x in inputs.values())
        replayed = runner.replay(step(length), q=q, k=k, v=v).clone()
        batch = step(length)
        plan = backend.init_forward_metadata(batch)
        with anyattn.forward_context(backend, plan):
            assert torch.equal(layer(q, k, v, batch), replayed)
        assert replayed.abs().max() > 0


def test_the_kit_passes_as_tests_of_this_package() -> None:
    """What a vendor's CI runs. `anyattn verify lumen_stream` does the same without pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "anyattn.testing",
         "--backend", "lumen_stream", "--device", "lumen"],
        env={**os.environ, "LUMEN_SIMULATOR": "l2"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "passed" in done.stdout
