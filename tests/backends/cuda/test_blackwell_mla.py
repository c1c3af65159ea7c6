"""`trtllm_mla` and `cutedsl_mla` on stand-ins (no SM100 has run them): numbers, workspaces, refusals."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from latent_steps import Served, case, watch

import anyattn
from anyattn.core.traits import SharedReadEnds
from anyattn.errors import BackendBuildError, FeatureError, SelectionError
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_judge import check_mla_case

_HOST = "cuda:sm100"
_FLASHINFERS = f"{_HOST}-tokenspeed-mla"
_TRTLLM = {"prefill": "trtllm_mla", "decode": "trtllm_mla", "verify": "trtllm_mla"}
_CUTE = {"prefill": "torch_native", "decode": "cutedsl_mla", "verify": "cutedsl_mla"}


@pytest.mark.parametrize(
    "step",
    [
        case("decode", (130, 0), (1, 1), page_size=32, slot_layout="interleaved"),
        case("verify", (70, 9), (2, 5), return_lse=False),
        case("verify", (33, 1), (3, 3), kv_dtype="float8_e4m3fn", kv_scale=2.0),
        case("extend", (0, 70, 3), (40, 2, 0), chunk_tokens=16, method="absorbed", padding=2),
        case("mixed", (0, 90), (33, 1), num_decode=1, kv_dtype="float8_e4m3fn", chunk_tokens=64),
    ],
    ids=["decode", "ragged verify", "fp8 verify", "chunked prefill", "mixed"],
)
def test_trtllm_judged_by_definition(step: MLACase) -> None:
    with emulating("trtllm_mla"):
        report = check_mla_case(step, backend="trtllm_mla", host=_HOST)
    assert report.passed, report
    assert report.method.expands == (step.mode in ("extend", "mixed"))


@pytest.mark.parametrize(
    ("step", "host"),
    [
        (case("decode", (200, 0), (1, 1), window=40, page_size=32), _HOST),
        (case("verify", (70, 9), (3, 3), window=40, dtype="float16", kv_dtype="float16"), _HOST),
        (case("verify", (70, 9), (4, 4), kv_dtype="float8_e4m3fn", kv_scale=0.5), _HOST),
        (case("decode", (200, 0), (1, 1), kv_dtype="float8_e4m3fn"), _FLASHINFERS),
        (case("verify", (70, 9), (3, 3)), _FLASHINFERS),
    ],
    ids=["window", "window, drafts", "fp8", "FlashInfer's, fp8", "FlashInfer's"],
)
def test_cute_judged_by_definition(step: MLACase, host: str) -> None:
    with emulating("trtllm_mla" if host == _FLASHINFERS else "cutedsl_mla"):
        report = check_mla_case(step, backend="cutedsl_mla", host=host)
    assert report.passed, report


def test_workspaces_are_zero_and_nobody_elses() -> None:
    with emulating("trtllm_mla"):
        first, second = (Served(_HOST, **_TRTLLM).backend._decode.workspace for _ in range(2))
        cute = Served(_FLASHINFERS, **_CUTE).backend.decode._decode.workspace
    assert len({w.data_ptr() for w in (first, second, cute)}) == 3
    assert not any(w.any() for w in (first, second, cute))


def test_scales_and_base_of_the_logarithm_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("trtllm_mla"):
        library = importlib.import_module("flashinfer.mla")
        ran = watch(monkeypatch, library, "trtllm_batch_decode_with_kv_cache_mla")
        served = Served(_HOST, kv_dtype="float8_e4m3fn", **_TRTLLM)
        served.step(served.decode((5, 99)), return_lse=True)
    (call,) = ran
    assert call["query"].dtype == call["kv_cache"].dtype == torch.float8_e4m3fn
    assert call["query"].shape == (2, 1, 16, 576)
    assert call["bmm1_scale"] == pytest.approx(192**-0.5)
    assert (call["bmm2_scale"], call["backend"], call["return_lse_base"]) == (1.0, "trtllm-gen", "basee")


def test_no_log_sum_exp_of_ragged_drafts() -> None:
    with emulating("trtllm_mla"):
        served = Served(_HOST, **_TRTLLM)
        with pytest.raises(FeatureError, match="ragged_verify"):
            served.step(served.verify((70, 9), (2, 3)), return_lse=True)
    step = case("verify", (70, 9), (2, 3))  # wants both
    with emulating("trtllm_mla"), pytest.raises(SelectionError, match="ragged_verify"):
        check_mla_case(step, backend="trtllm_mla", host=_HOST)


def test_a_window_smaller_than_the_drafts_is_refused() -> None:
    with emulating("cutedsl_mla"):
        served = Served(_HOST, window=3, **_CUTE)
        assert not served.step(served.verify((70, 9), (3, 3))).isnan().any()
        with pytest.raises(FeatureError, match="window"):
            served.step(served.verify((70, 9), (4, 4)))


def test_stubs_of_a_library_that_cannot_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*args: Any, **kwargs: Any) -> None:
        raise ImportError("tokenspeed_mla requires CuTe DSL")

    with emulating("cutedsl_mla"):
        library = importlib.import_module("tokenspeed_mla")
        monkeypatch.setattr(library, "tokenspeed_mla_decode", unavailable)
        with pytest.raises(BackendBuildError, match="stubs"):
            Served(_HOST, **_CUTE)


def test_captured_bounds_hold_any_replay() -> None:
    with emulating("cutedsl_mla"):
        served = Served(_HOST, **_CUTE)
        served.backend.init_cuda_graph_state(served.limits)
        plan = served.backend.init_forward_metadata_out_graph(served.decode((1, 1)), in_capture=True)
        assert plan.private == (1, served.limits.max_context)
        served.backend.init_forward_metadata_in_graph(plan)
        traits = served.backend.traits(anyattn.ForwardMode.DECODE)
        assert traits.shared_read_ends is SharedReadEnds.IN_REPLAY
        (table,) = plan.tables.values()
        assert (table.blocks > 0).all()  # no cell names page 0, which may hold NaN
