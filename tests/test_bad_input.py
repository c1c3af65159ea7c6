"""Bad input: every mistake is an error of its class that names what was asked, what is allowed, what next.

Here: names, options, backends, libraries, pools and data types. Batches and calls: `test_bad_steps.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from bad_input_tools import Engine, refused, select

import anyattn
from anyattn import errors
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.select.decision import Degraded
from anyattn.detect import simulate


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


# -- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "suggestion"),
    [
        ("backend", "torch_natve", "torch_native"),
        ("prefill", "flash_infer", "flashinfer"),
        ("decode", "trton", "triton"),
        ("verify", "f4", "fa4"),
        ("draft", "torchnative", "torch_native"),
        ("layout", "NDH", "NHD"),
        ("dtype", "flaot32", "float32"),
        ("kv_dtype", "float8_e4m3", "float8_e4m3fn"),
        ("features", ["widow"], "window"),
        ("deterministic", "batch_invariant", "batch-invariant"),
        ("kind", "line", "linear"),
        ("host", "rcom:gfx942", "rocm:gfx942"),
        ("host", "cuda:sm91", "cuda:sm90"),
    ],
)
def test_unknown_name_suggests_the_nearest(option: str, value: Any, suggestion: str) -> None:
    changes = {"device": None, "backend": None} if option == "host" else {}
    with refused(errors.UnknownNameError, f"did you mean {suggestion!r}"):
        select(**{**changes, option: value})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="pagesize"):
        select(pagesize=4)


@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("ANYATTN_BACKEDN", "triton", errors.UnknownNameError, "did you mean 'ANYATTN_BACKEND'"),
        ("ANYATTN_BACKEND", "torch_natve", errors.UnknownNameError, "did you mean 'torch_native'"),
        ("ANYATTN_DECODE_BACKEND", "flashinfr", errors.UnknownNameError, "did you mean 'flashinfer'"),
        ("ANYATTN_CHECKS", "ful", errors.ConfigError, "off, host, full"),
        ("ANYATTN_PAGE_SIZE", "sixteen", errors.ConfigError, "ANYATTN_PAGE_SIZE"),
        ("ANYATTN_PAGE_SIZE", "0", errors.ConfigError, "ANYATTN_PAGE_SIZE"),
        ("ANYATTN_PAGE_SIZE", "²", errors.ConfigError, "ANYATTN_PAGE_SIZE"),
        ("ANYATTN_ASSUME", "cuda:sm9", errors.UnknownNameError, "cuda:sm90"),
    ],
)
def test_environment(
    name: str, value: str, kind: type[errors.AnyattnError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with refused(kind, words):
        select(backend=None, page_size=None, device=None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limits", (1, 2, 3)),
        ("page_size", "16"),
        ("page_size", 16.0),
        ("page_size", True),
        ("layout", 3),
        ("backend", ["triton"]),
        ("decode", 3),
        ("deterministic", 7),
        ("features", 3),
        ("features", ["lse", 3]),
        ("kind", 3),
        ("host", {}),
    ],
)
def test_wrong_types_of_options(option: str, value: Any) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        select(**{option: value})
    assert caught.value.asked is not None
    assert caught.value.allowed is not None
    assert caught.value.hint


@pytest.mark.parametrize("specs", [[], "x", [1], 7, [anyattn.AttentionSpec, None]])
def test_specs_that_are_none(specs: Any) -> None:
    with refused(errors.ConfigError):
        anyattn.select(specs, dtype="float32", host="cpu:avx2")


def test_one_feature_needs_no_list() -> None:
    assert select(features="lse").request.features == {anyattn.Feature.LSE}


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANYATTN_CHECKS", "ANYATTN_BACKEND", "ANYATTN_PAGE_SIZE", "ANYATTN_ASSUME"):
        monkeypatch.setenv(name, "")
    assert select(backend=None).prefill.backend == "torch_native"


def test_an_assumed_host_explains_why_the_device_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_ASSUME", "cuda:sm90")
    with refused(errors.ConfigError, "unset ANYATTN_ASSUME"):
        select(device="cpu")


# -- backends that can't ---------------------------------------------------------------------------------


def test_explicit_backend_of_other_hardware_is_refused_with_who_can() -> None:
    with refused(errors.SelectionError, "fa3", "cpu", "torch_native"):
        select(backend="fa3")


def test_explicit_backend_without_the_head_size_is_refused() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=80)
    with refused(errors.SelectionError, "flashinfer", "head", "80"):
        anyattn.select(spec, dtype="bfloat16", host="cuda:sm90", backend="flashinfer")


def test_unsupported_dtypes() -> None:
    with refused(errors.UnknownNameError, "int32", "float32"):
        select(dtype=torch.int32)
    with refused(errors.SelectionError, "float64", "float32"):
        select(dtype=torch.float64)
    with refused(errors.SelectionError, "int8"):
        select(kv_dtype=torch.int8)


def test_feature_that_the_backend_lacks() -> None:
    with refused(errors.SelectionError, "alibi", "torch_native"):
        select(features=[anyattn.Feature.ALIBI])
    with refused(errors.SelectionError, "torch_native: feature: asked alibi, allowed"):
        select(backend=None, features=["alibi"])


def broken_host(reason: str = "libfoo.so.1: cannot open shared object file") -> HostFacts:
    facts = simulate("cuda:sm90")
    library = facts.library("flashinfer-python")
    broken = dataclasses.replace(library, state=LibraryState.BROKEN, reason=reason)
    return dataclasses.replace(facts, libraries={**facts.libraries, "flashinfer-python": broken})


def test_broken_library_auto_goes_on_and_says_why() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    decision = anyattn.select(spec, dtype="bfloat16", host=broken_host())
    chosen = {decision.prefill.backend, decision.decode.backend}
    assert "flashinfer" not in chosen
    (verdict,) = {
        c.verdict for c in decision.candidates if c.backend == "flashinfer" and c.phase.value == "decode"
    }
    assert "libfoo.so.1" in str([str(r) for r in verdict.reasons])


def test_broken_library_explicit_refuses() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    with refused(errors.SelectionError, "flashinfer", "libfoo.so.1"):
        anyattn.select(spec, dtype="bfloat16", host=broken_host(), backend="flashinfer")


def test_head_size_that_nobody_serves_gets_the_reference_with_a_reason() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=72, v_head_dim=40)
    decision = anyattn.select(spec, dtype="float32", host="cuda:sm80")
    assert decision.decode.backend == "torch_native"
    assert isinstance(decision.decode.verdict, Degraded)


def test_library_that_fails_at_build_time_is_a_typed_error(engine: Engine) -> None:
    choice = dataclasses.replace(engine.decision.prefill, target="anyattn.backends.reference.nowhere:Missing")
    decision = dataclasses.replace(engine.decision, prefill=choice)
    with refused(errors.BackendBuildError, "torch_native", "nowhere", "doctor", without="allowed"):
        anyattn.create_backend(decision, engine.pool, engine.table)


def test_simulated_decision_without_an_adapter_builds_nothing(engine: Engine) -> None:
    choice = dataclasses.replace(engine.decision.prefill, target=None, built=False)
    decision = dataclasses.replace(engine.decision, prefill=choice)
    with refused(errors.BackendBuildError, "torch_native", "no adapter", without="allowed"):
        anyattn.create_backend(decision, engine.pool, engine.table)


# -- pools and tables ------------------------------------------------------------------------------------


def test_pool_sizes_and_scales(engine: Engine) -> None:
    with refused(errors.PoolError, "multiple of 4", "num_slots=12"):
        anyattn.kv.create_pool(engine.decision, num_slots=10)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with refused(errors.PoolError, "KV scale"):
            anyattn.kv.create_pool(engine.decision, num_slots=8, k_scale=scale)
    with refused(errors.PoolError, "per KV head"):
        anyattn.kv.create_pool(engine.decision, num_slots=8, v_scale=[1.0, 1.0, 1.0])


def test_pool_of_another_decision(engine: Engine) -> None:
    other = select(page_size=8)
    with refused(errors.PoolError, "page size"):
        anyattn.create_backend(other, engine.pool, engine.table)
    wider = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=16)
    other = anyattn.select([wider], dtype=torch.float32, device="cpu", page_size=4, backend="torch_native")
    with refused(errors.PoolError, "other layers"):
        anyattn.create_backend(other, engine.pool, engine.table)


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_requests": 0},
        {"max_requests": "4"},
        {"max_context": 4.5},
        {"max_encoder": -1},
        {"device": "nonsense"},
        {"max_requests": 10**12, "max_context": 10**6},
    ],
)
def test_request_tables_that_can_not_be(sizes: dict[str, Any]) -> None:
    with refused(errors.PoolError, "request table"):
        anyattn.kv.RequestTable(**({"max_requests": 4, "max_context": 4} | sizes))


@pytest.mark.parametrize("slots", ["8", 8.0, None, 4 * 10**14])
def test_pools_that_can_not_be(engine: Engine, slots: Any) -> None:
    with refused(errors.PoolError):
        anyattn.kv.create_pool(engine.decision, num_slots=slots)


def test_arguments_in_the_wrong_place(engine: Engine) -> None:
    with refused(errors.PoolError, "create_backend(decision, pool, table)"):
        anyattn.create_backend(engine.decision, engine.table, engine.pool)  # type: ignore[arg-type]
    with refused(errors.BackendBuildError, "create_backend(decision, pool, table)"):
        anyattn.create_backend("torch_native", engine.pool, engine.table)  # type: ignore[arg-type]
    with refused(errors.PoolError, "anyattn.select"):
        anyattn.kv.create_pool("torch_native", num_slots=8)  # type: ignore[arg-type]
    with refused(errors.ContextError, "NoneType"):
        anyattn.forward_context(engine.backend, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, "a", 1.0])
def test_layer_numbers(number: Any) -> None:
    with refused(errors.ConfigError, "layer_id"):
        anyattn.AttentionLayer(anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16), number)


# -- data types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 0},
        {"num_q_heads": 3},
        {"head_dim": -1},
        {"v_head_dim": -8},
        {"sliding_window": 0},
        {"logit_cap": 0.0},
        {"scale": float("nan")},
        {"mla": anyattn.MLASpec()},
        {"num_q_heads": "4"},
        {"num_q_heads": 4.0},
        {"num_kv_heads": True},
        {"head_dim": None},
        {"sliding_window": 2.5},
        {"logit_cap": "30"},
        {"logit_cap": float("inf")},
        {"scale": "1"},
        {"sinks": torch.zeros(4)},
        {"kind": "causal"},
        {"mla": True},
        {"kv_shared_with": -1},
    ],
)
def test_impossible_specs(change: dict[str, Any]) -> None:
    with refused(errors.ConfigError):
        anyattn.AttentionSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | change))


def test_impossible_limits() -> None:
    with pytest.raises(errors.ConfigError, match="max_tokens"):
        anyattn.Limits(max_requests=1, max_tokens=0, max_context=4)
    with pytest.raises(errors.ConfigError, match="max_draft_tokens"):
        anyattn.Limits(max_requests=1, max_tokens=1, max_context=4, max_draft_tokens=-1)


def test_missing_library_facts_are_missing_not_broken() -> None:
    assert LibraryFacts("x").state is LibraryState.UNKNOWN
    assert HostFacts("cpu", "avx2").library("flashinfer-python").state is LibraryState.MISSING
