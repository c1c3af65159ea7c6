"""`anyattn select`: options, text and JSON."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import pytest

from anyattn.cli import select as command
from anyattn.core.capabilities import Feature
from anyattn.core.select.decision import Decision
from anyattn.core.spec import AttentionKind
from anyattn.errors import ConfigError, SelectionError, UnknownNameError

BASE = "--assume rocm:gfx942 --q-heads 32 --kv-heads 8 --head-dim 128"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("ANYATTN_")]:
        monkeypatch.delenv(name)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(line.split())


def decide(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert command.run(parse(f"{line} --json")) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_json_is_the_whole_decision(capsys: pytest.CaptureFixture[str]) -> None:
    data = decide(BASE, capsys)
    assert data["host"]["platform"] == "rocm"
    assert data["host"]["simulated"] is True
    assert {"backend", "method", "built", "kernel_page"} <= set(data["decode"])
    assert Decision.from_json(data).to_json() == data


def test_text_names_machine_model_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parse(BASE)) == 0
    out = capsys.readouterr().out
    for part in ("MI300X", "rocm:gfx942", "32/8 heads of size 128", "prefill", "KV pool", "why not"):
        assert part in out


def test_every_option_reaches_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--assume cuda:sm90 --q-heads 16 --kv-heads 4 --head-dim 128 --v-head-dim 64 --dtype fp16"
        " --kv-dtype fp16 --window 77 --logit-cap 30 --scale 0.25 --sinks --page-size 32 --layout NHD"
        " --prefill torch_native"
        " --decode torch_native --verify torch_native --draft torch_native --deterministic run-to-run"
        " --feature lse kv_scales --feature tree_verify --draft-tokens 5"
    )
    data = decide(line, capsys)
    request = Decision.from_json(data).request
    spec = request.specs[0]
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (16, 4, 128, 64)
    assert (spec.sliding_window, spec.logit_cap, spec.scale, spec.sinks) == (77, 30.0, 0.25, True)
    assert (request.dtype, request.kv_dtype, request.page_size, request.layout) == (
        "float16",
        "float16",
        32,
        "NHD",
    )
    assert (request.prefill, request.decode, request.verify, request.draft) == ("torch_native",) * 4
    assert request.deterministic == 1
    assert request.features == {Feature.LSE, Feature.KV_SCALES, Feature.TREE_VERIFY}
    assert request.limits is not None
    assert request.limits.max_draft_tokens == 5
    assert data["kv"]["page_size"] == 32


def test_mla_has_deepseeks_sizes_unless_given() -> None:
    spec = command.spec_of(parse("--mla"))
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (128, 1, 576, 512)
    assert spec.scale == pytest.approx(192**-0.5)
    spec = command.spec_of(parse("--mla 256,64,64,64 --q-heads 16"))
    assert spec.mla is not None
    assert (spec.num_q_heads, spec.head_dim, spec.v_head_dim, spec.mla.kv_lora_rank) == (16, 320, 256, 256)
    assert command.spec_of(parse("--mla --head-dim 192 --kv-heads 128")).v_head_dim == 128
    for line in ("--mla --head-dim 80", "--mla 1,2,3", "--mla a,b,c,d"):
        with pytest.raises(ConfigError, match=r"mla|MLA"):
            command.spec_of(parse(line))


def test_attention_kinds_and_defaults() -> None:
    assert command.spec_of(parse("--attention cross")).kind is AttentionKind.CROSS
    spec = command.spec_of(parse(""))
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.kind.value) == (32, 8, 128, "causal")
    assert not command.model_given(parse("--assume cuda:sm90 --backend fa3"))
    assert command.model_given(parse("--sinks"))
    assert command.model_given(parse("--feature lse"))


def test_this_machine_without_assume(capsys: pytest.CaptureFixture[str]) -> None:
    data = decide("--device cpu --dtype float32", capsys)
    assert data["host"]["platform"] == "cpu"
    assert data["host"]["simulated"] is False
    assert data["decode"]["built"] is True


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        (f"{BASE} --backend aitr", UnknownNameError, "did you mean 'aiter'"),
        (f"{BASE} --backend fa3", SelectionError, "can't serve prefill, decode on rocm:gfx942"),
        (f"{BASE} --page-size 0", ConfigError, "page_size"),
        (f"{BASE} --feature teleport", UnknownNameError, "unknown feature"),
        (f"{BASE} --kv-heads 5", ConfigError, "multiple of KV heads"),
        (f"{BASE} --device cpu", ConfigError, "assumed"),
        ("--assume rocm:gfx9000", UnknownNameError, "unknown simulated host"),
    ],
)
def test_bad_input_is_a_clear_error(line: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        command.run(parse(line))
