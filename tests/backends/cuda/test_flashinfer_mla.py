"""`flashinfer` for latent layers on its stand-in: both APIs, plans from host arrays, leases, refusals."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from latent_steps import Served, case, watch

import anyattn
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.errors import PlanError
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_judge import check_mla_case

_HOST = "cuda:sm90"
_ALL = {"prefill": "flashinfer", "decode": "flashinfer", "verify": "flashinfer"}
_STEPS = {
    "decode": case("decode", (200, 0, 15), (1, 1, 1), page_size=16, slot_layout="shuffled_pages"),
    "extend": case("extend", (70, 3), (5, 33), page_size=1, method="absorbed", return_lse=False),
    "chunked": case("extend", (0, 70, 3), (40, 2, 0), chunk_tokens=16, method="materialised", padding=2),
    "no prefix": case("extend", (0, 0), (40, 7), method="materialised", apart=True),
    "verify": case("verify", (70, 9), (2, 5), num_q_heads=128),
}


@pytest.fixture(name="library")
def _library() -> Iterator[Any]:
    with emulating("flashinfer_mla"):
        yield importlib.import_module("flashinfer.mla")


@pytest.mark.parametrize("step", _STEPS.values(), ids=_STEPS)
def test_judged_by_definition(library: Any, step: MLACase) -> None:
    report = check_mla_case(step, backend="flashinfer", host=_HOST)
    assert report.passed, report
    assert report.method.expands == (step.method == "materialised")


def test_fp8_latents_keep_their_scale_and_queries_their_dtype(library: Any) -> None:
    step = case("verify", (130, 2), (3, 1), kv_dtype="float8_e4m3fn", kv_scale=0.5)
    report = check_mla_case(step, backend="flashinfer", host=_HOST)
    assert report.passed, report
    assert not report.rounded


def _as_in_0_6(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's classes with the parameters of 0.6: flat arrays, LSE in base 2 unless asked in `run`."""
    new, prefill = library.BatchMLAPagedAttentionWrapper, importlib.import_module("flashinfer.prefill")
    ragged = prefill.BatchPrefillWithRaggedKVCacheWrapper

    class Latent(new):  # type: ignore[misc]
        def plan(
            self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int,
            head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
            q_data_type: Any, kv_data_type: Any, use_profiler: bool = False,
        ) -> None:  # fmt: skip
            super().plan(
                qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
                page_size, causal, sm_scale, q_data_type, kv_data_type,
            )  # fmt: skip

        def run(
            self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any, out: Any = None, lse: Any = None,
            return_lse: bool = False,
        ) -> Any:  # fmt: skip
            return super().run(q_nope, q_pe, ckv_cache, kpe_cache, out=out, lse=lse, return_lse=return_lse)

    class Ragged(ragged):  # type: ignore[misc]
        def run(
            self,
            q: Any,
            k: Any,
            v: Any,
            *args: Any,
            out: Any = None,
            lse: Any = None,
            return_lse: bool = False,
        ) -> Any:
            return super().run(q, k, v, *args, out=out, lse=lse, return_lse=return_lse)

    monkeypatch.setattr(library, "BatchMLAPagedAttentionWrapper", Latent)
    monkeypatch.setattr(prefill, "BatchPrefillWithRaggedKVCacheWrapper", Ragged)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["decode", "chunked", "verify"])
def test_the_older_api(library: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _as_in_0_6(library, monkeypatch)
    report = check_mla_case(_STEPS[name], backend="flashinfer", host=_HOST)
    assert report.passed, report


def test_one_plan_a_step_from_arrays_on_the_host(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = watch(monkeypatch, library.BatchMLAPagedAttentionWrapper, "plan")
    served = Served(_HOST, layers=3, **_ALL)
    batch = served.decode((100, 7))
    plan = served.backend.init_forward_metadata(batch)
    for layer in range(3):
        assert not served.run(batch, plan, layer).isnan().any()
    (call,) = planned
    assert (call["causal"], call["num_heads"], call["page_size"]) == (False, 16, 64)
    (table,) = plan.tables.values()
    assert call["metadata"].kv_indices.data_ptr() == table.csr[1].data_ptr()
    for name in ("qo_indptr", "kv_indptr", "kv_len_arr"):
        array = getattr(call["metadata"], name)
        assert (array.device.type, array.dtype) == ("cpu", torch.int32)


def test_plans_alive_at_once_have_wrappers_of_their_own(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watch(monkeypatch, library.BatchMLAPagedAttentionWrapper, "__init__")
    served = Served(_HOST, **_ALL)
    batches = [served.decode((100, 7)), served.decode((33, 1))]
    plans = [served.backend.init_forward_metadata(batch) for batch in batches]
    assert len(made) == 2
    for batch, plan in zip(batches, plans, strict=True):
        assert not served.run(batch, plan).isnan().any()  # NaN: planned over
    plans.clear()
    del plan
    gc.collect()
    served.step(served.decode((5, 6)))
    assert len(made) == 2


def test_a_graphs_wrapper_is_planned_again_in_its_buffers(library: Any) -> None:
    served = Served(_HOST, **_ALL)
    served.backend.init_cuda_graph_state(served.limits)
    plan = served.backend.init_forward_metadata_out_graph(served.decode((1, 1)), in_capture=True)
    ((wrapper, scratch),) = plan.private.runs
    replayed = served.decode((120, 33))
    again = served.backend.init_forward_metadata_out_graph(replayed, captured=plan)
    served.backend.init_forward_metadata_in_graph(again)
    assert again.private.runs[0][0] is wrapper
    assert again.private.runs[0][1] is scratch
    out, lse = served.run(replayed, again, return_lse=True)
    assert not out.isnan().any()
    assert lse.isfinite().all()


def test_tiles_that_would_cut_a_token_are_refused(library: Any) -> None:
    """128 heads fill tiles of 128 rows; a batch of mostly nothing has tiles of 64."""
    served = Served(_HOST, heads=128, **_ALL)
    served.backend.mla.policy = MLAPolicy(method=MLAMethod.ABSORBED)
    rows, prefix, slots = [0, 1, 2, 3], [70, 70, 70, 70], []
    extend = [2, 0, 0, 0]
    slots = [64 + 70, 64 + 71]
    with pytest.raises(PlanError, match="two tiles"):
        served.backend.init_forward_metadata(anyattn.ForwardBatch.extend(rows, prefix, extend, slots))


def test_what_the_library_will_not_plan_is_a_typed_error(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, **kwargs: Any) -> None:
        raise ValueError("native capacity is 16384.")

    served = Served(_HOST, **_ALL)
    monkeypatch.setattr(library.BatchMLAPagedAttentionWrapper, "plan", refuse)
    with pytest.raises(PlanError, match="native capacity"):
        served.backend.init_forward_metadata(served.decode((5,)))


def test_xqa_decodes_where_the_row_says_so() -> None:
    host = "cuda:sm120"
    step = case(
        "decode", (200, 0), (1, 1), num_q_heads=128, kv_dtype="float8_e4m3fn", kv_scale=2.0, return_lse=False
    )
    with emulating("flashinfer_mla", host):
        report = check_mla_case(step, backend="flashinfer", host=host)
    assert report.passed, report
    assert report.rounded


@pytest.mark.parametrize(("heads", "prefills"), [(16, True), (128, True), (20, False)])
def test_head_counts_of_causal_phases(heads: int, prefills: bool) -> None:
    spec = case("decode", (1,), (1,), num_q_heads=heads).spec()
    decision = anyattn.select([spec], dtype="bfloat16", host=_HOST, page_size=1, decode="flashinfer")
    assert (decision.prefill.backend == "flashinfer") is prefills
