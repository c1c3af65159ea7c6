"""The decision record: JSON both ways, digest, text."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from select_fakes import KLIB, SPEC, both, host, library, prefer, record, reference, request, row, run

from anyattn.core.capabilities import Feature, ModelKind, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import SCHEMA, Decision, ReasonCode
from anyattn.core.select.explain import phrase, summary
from anyattn.core.select.request import Request
from anyattn.core.spec import AttentionKind, AttentionSpec, Limits, MLASpec
from anyattn.errors import ConfigError


def sample(**fields: Any) -> Decision:
    entries = (
        record("fa9", row(providers=(KLIB,), method="paged")),
        record("elsewhere", row(architectures=("rocm:g1",))),
        record("latent", row(kinds=(ModelKind.MLA,))),
        record("later", built=False),
        record("picky", row(features=())),
        reference(),
    )
    asked = fields.pop("asked", request(features=frozenset({Feature.LSE}), limits=Limits(8, 64, 128, 2)))
    facts = fields.pop("facts", host("x1", library("2.1"), features=frozenset({"b", "a"}), notes=("hi",)))
    return run(entries, asked, facts, both("fa9"), **fields)


# --- JSON --------------------------------------------------------------------------------------------


def test_json_round_trip_is_exact() -> None:
    for decision in (sample(), sample(facts=host()), sample(asked=request(backend="torch_native"))):
        text = json.dumps(decision.to_json())
        again = Decision.from_json(json.loads(text))
        assert again == decision
        assert again.digest() == decision.digest()
        assert str(again) == str(decision)


def test_json_has_the_documented_keys() -> None:
    data = sample().to_json()
    assert {"schema", "host", "request", "kv", "prefill", "decode", "verify", "draft", "candidates"} <= set(
        data
    )
    assert set(data["kv"]) == {"page_size", "layout", "dtype"}
    for phase in Phase:
        assert {"backend", "method", "built", "kernel_page"} <= set(data[phase.value])
    for entry in data["candidates"]:
        assert {"backend", "phase", "verdict", "reasons"} <= set(entry)
        assert all(set(reason) == {"code", "asked", "allowed", "hint"} for reason in entry["reasons"])
    pairs = {(e["backend"], e["phase"]) for e in data["candidates"]}
    assert len(pairs) == len(data["candidates"]) == 6 * 4


def test_every_verdict_of_json_has_its_reasons() -> None:
    for entry in sample().to_json()["candidates"]:
        assert bool(entry["reasons"]) is (entry["verdict"] != "accepted")
        assert {r["code"] for r in entry["reasons"]} <= {c.value for c in ReasonCode}


def test_another_schema_or_a_damaged_decision_is_refused() -> None:
    data = sample().to_json()
    with pytest.raises(ConfigError, match="schema"):
        Decision.from_json({**data, "schema": SCHEMA + 1})
    for key in ("kv", "prefill", "host", "candidates"):
        with pytest.raises(ConfigError):
            Decision.from_json({k: v for k, v in data.items() if k != key})
    with pytest.raises(ConfigError, match="expected int, found 'many'"):
        Decision.from_json({**data, "kv": {**data["kv"], "page_size": "many"}})
    with pytest.raises(ConfigError, match="platforms"):
        Decision.from_json({**data, "host": {**data["host"], "platforms": "cuda"}})


def test_a_request_round_trips_with_all_fields() -> None:
    mla = AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=0.1, mla=MLASpec())
    cross = dataclasses.replace(SPEC, kind=AttentionKind.CROSS, sliding_window=7, logit_cap=1.5, sinks=True)
    asked = request(
        mla, cross, SPEC, kv_dtype="fp8_e5m2", limits=Limits(1, 2, 3), page_size=8, layout="HND", decode="a",
        deterministic=2, features=frozenset({Feature.LSE, Feature.ALIBI}), kind=ModelKind.SPARSE,
    )  # fmt: skip
    assert Request.from_json(json.loads(json.dumps(asked.to_json()))) == asked
    assert asked.kv_dtype == "float8_e5m2"


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Request(specs=(), dtype="bf16")
    with pytest.raises(ConfigError, match="page_size"):
        request(page_size=0)
    with pytest.raises(ConfigError, match="deterministic"):
        request(deterministic=3)


# --- digest ------------------------------------------------------------------------------------------


def test_ranks_that_decide_alike_have_one_digest() -> None:
    one = sample()
    other = sample(
        asked=dataclasses.replace(one.request, device="cuda:7"),
        facts=dataclasses.replace(one.host, device_name="Fake GPU 2", memory_bytes=5, driver="9", notes=()),
    )
    assert other != one
    assert other.digest() == one.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"asked": request(dtype="float16")},
        {"asked": request(page_size=16)},
        {"asked": request(backend="torch_native")},
        {"facts": host("x2", library("2.1"))},
        {"facts": host("x1", library("2.2"))},
        {"facts": host("x1", library("2.1"), torch="2.14.0")},
    ],
)
def test_what_matters_changes_the_digest(change: dict[str, Any]) -> None:
    assert sample(**change).digest() != sample().digest()


def test_the_digest_does_not_depend_on_the_process() -> None:
    code = "import test_decision; print(test_decision.sample().digest())"
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent)}
        out = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        found.add(out.stdout.strip())
    assert found == {sample().digest()}


def test_versions_are_those_of_what_was_chosen() -> None:
    assert {"anyattn", "torch", "runtime", "klib"} == set(sample().versions)
    assert "klib" not in sample(asked=request(backend="torch_native")).versions


# --- text --------------------------------------------------------------------------------------------


def test_the_text_says_what_why_and_why_not() -> None:
    text = str(sample())
    lines = text.splitlines()
    assert lines[0] == "Attention on Fake GPU (cuda:x1, cuda runtime 13.0)"
    assert "32/8 heads of size 128; bfloat16, lse" in lines[1]
    assert lines[2].split() == ["prefill", "fa9", "paged", "preferred", "here"]
    assert lines[4].split() == ["verify", "fa9", "paged", "same", "backend", "as", "prefill"]
    assert "  because  prefill, decode: a guess (2026-01-02)" in lines
    assert "pages of 64 tokens, layout NHD, bfloat16" in text
    assert any(line.split()[0] == "picky" and "no lse" in line for line in lines)
    assert any(line.split()[0] == "later" and "no adapter" in line for line in lines)
    assert "made for other hardware: elsewhere" in text
    assert "made for other models: latent" in text
    assert max(map(len, lines)) <= 120


def test_the_text_tells_why_a_slow_backend_won() -> None:
    text = str(sample(facts=host()))
    assert "torch_native is slow: reference, not a fast path; nearest: fa9" in text
    assert "klib>=2.0,<3 is not installed" in text


def test_the_summary_is_one_line() -> None:
    line = summary(sample())
    assert "\n" not in line
    for part in ("Fake GPU", "prefill fa9", "decode fa9", "page 64 NHD bfloat16", sample().digest()):
        assert part in line


def test_a_simulated_winner_without_an_adapter_is_marked() -> None:
    facts = HostFacts("cuda", "x1", simulated=True, runtime="13.0")
    decision = run((record("later", built=False), reference()), facts=facts, preferences=both("later"))
    assert (decision.decode.backend, decision.decode.built, decision.decode.target) == ("later", False, None)
    assert "preferred here; no adapter in this version" in str(decision)
    assert "simulated cuda:x1" in str(decision).splitlines()[0]


def test_empty_roles_and_kernel_pages_are_told() -> None:
    from anyattn.core.capabilities import PageSizes

    entries = (
        record("p", row(phases=(Phase.PREFILL,), pages=PageSizes((16,)))),
        record("d", row(phases=(Phase.DECODE,), pages=PageSizes((64,)))),
        record("n", row(phases=(Phase.VERIFY,), layouts=("HND",))),
    )
    text = str(run(entries, preferences=(prefer("p"),)))
    assert "verify   nobody" in text
    assert "(kernel pages: prefill 16)" in text
    assert "note     verify: left empty" in text


def test_a_choice_by_registration_alone_says_so() -> None:
    assert "first registered" in str(run((record("a"), record("b"))))


def test_every_reason_code_has_a_phrase() -> None:
    from anyattn.core.select.decision import Reason

    for code in ReasonCode:
        text = phrase(Reason(code, "ASKED", "ALLOWED", "HINT"))
        assert text
        assert "{" not in text
