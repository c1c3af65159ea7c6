"""`flashmla` on its stand-in: schedules fresh each step and stable in graphs, builds told apart, refusals."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from latent_steps import Served, case, watch

import anyattn
from anyattn.core.traits import GraphSupport, SharedReadEnds
from anyattn.errors import BackendBuildError, FeatureError, HostLengthError
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_judge import check_mla_case

_HOST = "cuda:sm90"
_ROLES = {"prefill": "torch_native", "decode": "flashmla", "verify": "flashmla"}
_DECODE = anyattn.ForwardMode.DECODE


@pytest.fixture(name="library")
def _library() -> Iterator[Any]:
    with emulating("flashmla"):
        yield importlib.import_module("flash_mla")


@pytest.mark.parametrize(
    "step",
    [
        case("decode", (200, 0, 63), (1, 1, 1), slot_layout="shuffled_pages", apart=True),
        case("decode", (70,), (1,), num_q_heads=128, strided=True, padding=2),
        case("verify", (130, 2), (3, 3), dtype="float16", kv_dtype="float16", flat=True),
        case("verify", (64, 1), (4, 4), kv_dtype="float8_e4m3fn", kv_scale=0.5, page_size=128),
    ],
    ids=["decode", "padded", "verify", "fp8"],
)
def test_judged_by_definition(library: Any, step: MLACase) -> None:
    report = check_mla_case(step, backend="flashmla", host=_HOST)
    assert report.passed, report


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_one_schedule_a_step_for_all_layers(
    library: Any, monkeypatch: pytest.MonkeyPatch, kv_dtype: str
) -> None:
    made = watch(monkeypatch, library, "get_mla_decoding_metadata")
    ran = watch(monkeypatch, library, "flash_mla_with_kvcache")
    served = Served(_HOST, layers=2, kv_dtype=kv_dtype, **_ROLES)
    for lens in ((100, 7), (101, 200)):
        plan = served.backend.init_forward_metadata(batch := served.decode(lens))
        for layer in range(2):
            assert not served.run(batch, plan, layer).isnan().any()  # NaN: a stale schedule
    assert [call["num_q_tokens_per_head_k"] for call in made] == [16, 16]
    assert all(call["use_legacy"] for call in made + ran)
    metas = [id(call["tile_scheduler_metadata"]) for call in ran]
    assert metas[0] == metas[1] != metas[2] == metas[3]
    assert all(call["q"].dtype == served.pool.kv_dtype for call in ran)


def test_a_graphs_schedule_keeps_its_addresses(library: Any) -> None:
    served = Served(_HOST, **_ROLES)
    served.backend.init_cuda_graph_state(served.limits)
    plan = served.backend.init_forward_metadata_out_graph(served.decode((1, 1)), in_capture=True)
    (schedule, _) = plan.private.schedules[16]
    before = schedule.tile_scheduler_metadata.data_ptr(), schedule.tile_scheduler_metadata.clone()
    replayed = served.decode((120, 33))
    again = served.backend.init_forward_metadata_out_graph(replayed, captured=plan)
    served.backend.init_forward_metadata_in_graph(again)
    assert again is plan
    assert plan.private.schedules[16][0] is schedule
    assert schedule.tile_scheduler_metadata.data_ptr() == before[0]
    assert not torch.equal(schedule.tile_scheduler_metadata, before[1])
    assert not served.run(replayed, plan).isnan().any()


def test_declarations(library: Any) -> None:
    traits = Served(_HOST, **_ROLES).backend.traits(_DECODE)
    assert (traits.shared_read_ends, traits.graph) == (SharedReadEnds.IN_REPLAY, GraphSupport.UNIFORM)
    assert not traits.rounds_queries
    assert Served(_HOST, kv_dtype="float8_e4m3fn", **_ROLES).backend.traits(_DECODE).rounds_queries


def test_drafts_with_lengths_on_the_device_need_a_bound(library: Any) -> None:
    served = Served(_HOST, **_ROLES)
    fields = {
        name: torch.tensor(v, device="meta") for name, v in (("seq_lens", [72, 11]), ("extend", [2, 2]))
    }
    unknown = served.verify((70, 9), (2, 2)).view(
        seq_lens=fields["seq_lens"], extend_seq_lens=fields["extend"], host_lens=None
    )
    with pytest.raises(HostLengthError, match="bounds"):
        served.backend.init_forward_metadata(unknown)
    bounded = served.verify((70, 9), (2, 2)).view(host_lens=anyattn.UpperBound(200, 2))
    assert not served.step(bounded).isnan().any()
    loose = served.verify((70, 9), (2, 2)).view(host_lens=anyattn.UpperBound(200, 3))
    with pytest.raises(FeatureError, match="one length"):
        served.backend.init_forward_metadata(loose)


def test_sglang_kernels_tensors_serve_too(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("sgl_kernel.flash_mla")
    made = watch(monkeypatch, module, "get_mla_metadata")
    ran = watch(monkeypatch, module, "flash_mla_with_kvcache")
    served = Served(f"{_HOST}-sgl-flash-mla-tokenspeed-flashmla", **_ROLES)
    assert not served.step(served.verify((70, 9), (2, 2))).isnan().any()
    assert [call["num_q_tokens_per_head_k"] for call in made] == [32]
    assert isinstance(ran[0]["tile_scheduler_metadata"], torch.Tensor)
    assert ran[0]["causal"]


def test_a_schedule_of_the_first_layers_cannot_be_captured(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = library.flash_mla_with_kvcache

    def tokenspeeds(
        q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int,
        tile_scheduler_metadata: Any, num_splits: None = None, softmax_scale: float | None = None,
        causal: bool = False, is_fp8_kvcache: bool = False,
    ) -> Any:  # fmt: skip
        return real(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits,
            softmax_scale, causal, is_fp8_kvcache, use_legacy=True,
        )  # fmt: skip

    monkeypatch.setattr(library, "flash_mla_with_kvcache", tokenspeeds)
    monkeypatch.delattr(library, "get_mla_decoding_metadata")
    served = Served(_HOST, layers=2, **_ROLES)
    assert served.backend.traits(_DECODE).graph is GraphSupport.NEVER
    for lens in ((5, 80), (6, 81)):
        assert not served.step(served.decode(lens)).isnan().any()
    with pytest.raises(BackendBuildError, match="descale_q"):
        Served(_HOST, kv_dtype="float8_e4m3fn", **_ROLES)


def test_drafts_of_different_lengths_are_refused(library: Any) -> None:
    served = Served(_HOST, **_ROLES)
    with pytest.raises(FeatureError, match="ragged_verify"):
        served.step(served.verify((70, 9), (2, 3)))


def test_prefill_beside_it_is_another_backends() -> None:
    decision = anyattn.select(
        [case("decode", (1,), (1,)).spec()], dtype="bfloat16", host=_HOST, decode="flashmla"
    )
    assert decision.decode.backend == "flashmla"
    assert decision.prefill.backend == "flashinfer"
    assert (decision.kv.page_size, decision.decode.kernel_page) == (64, 64)
