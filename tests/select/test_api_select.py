"""`anyattn.api.select` on the real catalog, platforms and detection."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import pytest
import torch

from anyattn import api
from anyattn.core.capabilities import Feature, ModelKind, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import Decision, Degraded, ReasonCode, Rejected
from anyattn.core.spec import AttentionSpec, Limits, MLASpec
from anyattn.core.traits import Determinism
from anyattn.errors import ConfigError, SelectionError, UnknownNameError

SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
MLA = AttentionSpec(
    num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, mla=MLASpec()
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("ANYATTN_") and n != "ANYATTN_CHECKS"]:
        monkeypatch.delenv(name)


def reasons(decision: Decision, backend: str, phase: Phase = Phase.DECODE) -> set[ReasonCode]:
    found = next(c for c in decision.candidates if (c.backend, c.phase) == (backend, phase))
    return {r.code for r in found.verdict.reasons} if isinstance(found.verdict, Rejected) else set()


def test_the_quick_start() -> None:
    decision = api.select([SPEC] * 2, dtype=torch.float32, device="cpu", limits=Limits(16, 512, 1024))
    assert decision.prefill.backend == decision.decode.backend == "torch_native"
    assert (decision.kv.page_size, decision.kv.layout, decision.kv.dtype) == (16, "NHD", "float32")
    assert decision.prefill.built
    assert decision.request.specs == (SPEC, SPEC)
    assert Decision.from_json(decision.to_json()) == decision


def test_torch_objects_are_normalised() -> None:
    decision = api.select(
        SPEC,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        device=torch.device("cuda", 1),
        host="cuda:sm90",
    )
    request = decision.request
    assert (request.dtype, request.kv_dtype, request.device) == ("bfloat16", "float8_e4m3fn", "cuda:1")
    other = api.select(SPEC, dtype="bf16", kv_dtype="fp8", host="cuda:sm90")
    assert other.request.device == "cuda"
    assert other.digest() == decision.digest()


@pytest.mark.parametrize("host", ["rocm:gfx1100", "rocm:gfx1151", "rocm:gfx1200", "rocm:gfx1201"])
def test_rdna_never_gets_aiter(host: str) -> None:
    for spec in (SPEC, MLA):
        decision = api.select(spec, dtype="bfloat16", host=host)
        for phase in Phase:
            assert "aiter" not in decision.phase(phase).backend
            assert reasons(decision, "aiter", phase)


@pytest.mark.parametrize("host", ["cuda:sm120", "cuda:sm121"])
def test_sm120_never_gets_a_kernel_of_sm100(host: str) -> None:
    for spec in (SPEC, MLA):
        decision = api.select(spec, dtype="bfloat16", host=host)
        for phase in Phase:
            assert f"{host}" in decision.phase(phase).row.architectures
    assert reasons(api.select(SPEC, dtype="bfloat16", host=host), "fa4") == {ReasonCode.ARCHITECTURE}


def test_one_name_may_have_a_class_for_each_model_kind() -> None:
    assert reasons(api.select(SPEC, dtype="bfloat16", host="cuda:sm90"), "flashmla") == {
        ReasonCode.MODEL_KIND
    }
    mla = api.select(MLA, dtype="bfloat16", host="cuda:sm90")
    assert mla.request.model_kind is ModelKind.MLA
    assert not reasons(mla, "flashmla")
    assert not reasons(mla, "flashinfer")
    assert reasons(mla, "trtllm_mha") == {ReasonCode.MODEL_KIND}


def test_an_odd_head_size_gets_the_reference_with_a_reason() -> None:
    odd = AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=520)
    decision = api.select(odd, dtype="bfloat16", host="cuda:sm90")
    assert decision.decode.backend == "torch_native"
    assert isinstance(decision.decode.verdict, Degraded)


def test_removing_a_library_removes_its_backends() -> None:
    decision = api.select(SPEC, dtype="bfloat16", host="cuda:sm90-flashinfer-python")
    assert reasons(decision, "flashinfer") == {ReasonCode.LIBRARY_MISSING}
    assert decision.decode.backend != "flashinfer"


def test_given_facts_are_used_as_they_are() -> None:
    facts = HostFacts("cpu", "avx2", device_name="A box")
    decision = api.select(SPEC, dtype="float32", host=facts)
    assert decision.host == facts
    assert "A box" in str(decision)


def test_levels_features_and_kinds_by_name_or_value() -> None:
    for level in ("run-to-run", Determinism.RUN_TO_RUN, 1):
        assert api.select(SPEC, dtype="float32", device="cpu", deterministic=level).request.deterministic == 1
    asked = api.select(SPEC, dtype="float32", device="cpu", features=["lse", Feature.EXPLICIT_MASK]).request
    assert asked.features == {Feature.LSE, Feature.EXPLICIT_MASK}
    assert api.make_request(SPEC, dtype="bf16", kind="linear").model_kind is ModelKind.LINEAR


def test_a_guarantee_that_nobody_gives_is_refused() -> None:
    with pytest.raises(
        SelectionError, match="determinism: asked batch-invariant, allowed at most run-to-run"
    ):
        api.select(
            SPEC, dtype="float32", host="cuda:sm90", backend="torch_native", deterministic="batch-invariant"
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"backend": "torch_nativ"}, "did you mean 'torch_native'"),
        ({"features": ["lsee"]}, "unknown feature"),
        ({"deterministic": "run2run"}, "unknown determinism"),
        ({"host": "cuda:sm91"}, "unknown simulated host"),
        ({"layout": "NDH"}, "unknown layout"),
        ({"kind": "spars"}, "did you mean 'sparse'"),
    ],
)
def test_unknown_names_suggest_the_nearest(fields: dict[str, object], text: str) -> None:
    with pytest.raises(UnknownNameError, match=text):
        api.select(SPEC, **({"dtype": "float32"} | fields))  # type: ignore[arg-type]


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_BACKENDS", "triton")
    with pytest.raises(UnknownNameError, match="did you mean 'ANYATTN_BACKEND'"):
        api.select(SPEC, dtype="float32", device="cpu")


def test_environment_choices_and_the_assumed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_ASSUME", "rocm:gfx942")
    monkeypatch.setenv("ANYATTN_DECODE_BACKEND", "triton")
    decision = api.select(SPEC, dtype="bfloat16")
    assert (decision.host.target, decision.host.simulated) == ("rocm:gfx942", True)
    assert (decision.decode.backend, decision.decode.how) == ("triton", "environment")
    with pytest.raises(ConfigError, match="assumed"):
        api.select(SPEC, dtype="float32", device="cpu")


def test_one_info_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="anyattn"):
        decision = api.select(SPEC, dtype="float32", device="cpu")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "torch_native" in caplog.text
    assert decision.digest() in caplog.text


def test_a_selection_takes_less_than_50_ms() -> None:
    specs = [SPEC] * 80
    api.select(specs, dtype="bfloat16", host="cuda:sm90")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        api.select(specs, dtype="bfloat16", host="cuda:sm90")
        api.select(specs, dtype="float32", device="cpu")
        times.append((time.perf_counter() - start) / 2)
    assert min(times) < 0.05


def test_selecting_imports_no_torch_triton_or_vendor_module() -> None:
    code = (
        "import sys; from anyattn import api; from anyattn.core.spec import AttentionSpec as S;"
        "d = api.select(S(num_q_heads=32, num_kv_heads=8, head_dim=128), dtype='bfloat16', host='cuda:sm90');"
        "bad = {'torch', 'triton', 'flashinfer', 'aiter', 'torch_npu', 'vllm'} & set(sys.modules);"
        "assert not bad, bad; print(d.decode.backend)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANYATTN_")}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
