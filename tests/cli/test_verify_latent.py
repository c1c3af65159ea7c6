"""`anyattn verify` on latent models: chosen by itself or asked for, emulated, one case, wrong options."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from anyattn.cli.main import main
from anyattn.core.capabilities import Feature
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase, parse_mla_case
from anyattn.testing.mla_declared import latent_declared


@pytest.fixture(name="stand_ins", autouse=True)
def _stand_ins() -> Iterator[None]:
    """The command installs stand-ins for its process; this one goes on."""
    with emulating("flashmla"):
        yield


def test_a_backend_of_latents_alone_needs_no_asking(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "flashmla", "--emulated", "--cases", "2", "--seed", "1", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert (outcome["backend"], outcome["target"], outcome["kind"]) == ("flashmla", "cuda:sm90", "mla")
    assert outcome["passed"] == outcome["cases"] == 2
    assert outcome["emulated"]


def test_a_case_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    case = MLACase(
        mode="decode", prefix_lens=(3,), extend_lens=(1,), page_size=64, dtype="bfloat16",
        kv_dtype="bfloat16", rank=512, rope=64, nope=128, v_dim=128,
    )  # fmt: skip
    assert parse_mla_case(repr(case)) == case
    assert main(["verify", "flashmla", "--emulated", "--case", repr(case)]) == 0
    assert capsys.readouterr().out.startswith("passed, absorbed")
    assert main(["verify", "flashmla", "--emulated", "--case", "print(1)"]) == 2
    assert main(["verify", "flashmla", "--emulated", "--random", "3"]) == 2


def test_both_kinds_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "torch_native", "--latent", "--cases", "3"]) == 0
    assert "torch_native on cpu" in (said := capsys.readouterr().out)
    assert "latent models: 3 passed, 0 failed" in said


@pytest.mark.parametrize("mode", ["extend", "mixed", "verify", "draft_extend", "decode"])
def test_cases_are_cut_down_to_what_is_declared(mode: str) -> None:
    declared = latent_declared("flashmla", host="cuda:sm90")
    wild = MLACase(
        mode=mode, prefix_lens=(3, 9), extend_lens=(1, 1) if mode == "decode" else (1, 4), page_size=16,
        num_decode=int(mode == "mixed"), num_q_heads=3, rank=512, rope=64, nope=128, v_dim=128, window=5,
        logit_cap=2.0, sinks=True, kv="arguments", kv_scale=2.0, dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    case = declared.fitted(wild, random.Random(0))
    assert case is not None
    assert case.mode in ("decode", "verify")
    assert (case.page_size % 64, case.window, case.logit_cap, case.sinks) == (0, None, None, False)
    assert (case.kv, case.kv_scale, len(set(case.extend_lens))) == ("write", 1.0, 1)
    rows = [row for row in declared.rows if case.kv_dtype in row.kv_dtypes]
    assert all(Feature.LSE in row.features for row in rows)
    assert case.return_lse
    small = MLACase(mode="decode", prefix_lens=(3,), extend_lens=(1,))
    assert declared.fitted(small, random.Random(0)) is None
