"""Traps that users of other systems fell into, as assertions on the data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anyattn.catalog import records
from anyattn.core.capabilities import CapabilityRow, Feature, ModelKind, Phase

RECORDS = {record.name: record for record in records()}
FP8 = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}


def rows(
    name: str, chip: str, phase: Phase | None = None, kind: ModelKind | None = None
) -> Iterator[CapabilityRow]:
    """Rows of a backend on a chip."""
    for row in RECORDS[name].rows:
        right_phase = phase is None or phase in row.phases
        right_kind = kind is None or kind in row.kinds
        if chip in row.architectures and right_phase and right_kind:
            yield row


def features(name: str, chip: str, kind: ModelKind = ModelKind.DENSE) -> set[Feature]:
    """All features that some row declares."""
    return {f for row in rows(name, chip, kind=kind) for f in row.features}


@pytest.mark.parametrize("chip", ["cuda:sm110", "cuda:sm120", "cuda:sm121"])
@pytest.mark.parametrize("name", ["trtllm_mla", "cutedsl_mla", "dsv4"])
def test_sm100_families_stay_on_sm100(name: str, chip: str) -> None:
    assert not list(rows(name, chip))


@pytest.mark.parametrize("chip", ["cuda:sm90", "cuda:sm120", "cuda:sm121"])
def test_trtllm_mha_elsewhere_is_xqa_without_lse_and_without_prefill(chip: str) -> None:
    found = list(rows("trtllm_mha", chip))
    assert found
    assert all(row.method.startswith("xqa") for row in found)
    assert all(Feature.LSE not in row.features and Phase.PREFILL not in row.phases for row in found)


@pytest.mark.parametrize("name", ["trtllm_mha", "trtllm_mla", "cutedsl_mla", "fa3"])
def test_sm110_is_not_sm100(name: str) -> None:
    assert not list(rows(name, "cuda:sm110"))


@pytest.mark.parametrize("chip", ["cuda:sm80", "cuda:sm86", "cuda:sm89", "cuda:sm120", "cuda:sm121"])
def test_fa4_has_no_paged_kv_there(chip: str) -> None:
    assert not list(rows("fa4", chip))


def test_fa4_does_not_tolerate_nan_in_the_tail_and_says_so_on_sm90() -> None:
    assert not any(row.tolerates_nan_tail for row in RECORDS["fa4"].rows)
    assert all(row.degraded and "split-KV" in row.degraded for row in rows("fa4", "cuda:sm90"))
    wide = [row for row in rows("fa4", "cuda:sm100") if row.head_dims.allows(256, 256)]
    assert wide
    assert all(
        not row.pages.allows(64) and row.pages.allows(128) and Feature.SINKS not in row.features
        for row in wide
    )


@pytest.mark.parametrize("chip", ["cuda:sm80", "cuda:sm86", "cuda:sm89"])
def test_fa3_before_sm90_is_one_providers_and_never_mla(chip: str) -> None:
    found = list(rows("fa3", chip))
    assert found
    assert all(row.kinds == (ModelKind.DENSE,) for row in found)
    names = {p.distribution for row in found for p in row.providers}
    assert names == {"sglang-kernel", "sgl-kernel"}


@pytest.mark.parametrize("chip", ["cuda:sm100", "cuda:sm103", "cuda:sm120", "cuda:sm121"])
def test_fa3_is_not_for_blackwell(chip: str) -> None:
    assert not list(rows("fa3", chip))


def test_tokenspeed_fa3_has_no_cap_and_no_odd_sizes() -> None:
    found = [r for r in RECORDS["fa3"].rows if any(p.distribution == "tokenspeed-fa3" for p in r.providers)]
    assert found
    for row in found:
        assert Feature.LOGIT_CAP not in row.features
        assert not row.head_dims.allows(96, 96)
        assert not row.head_dims.allows(192, 128)


def test_fa3_reads_no_e5m2() -> None:
    assert not any("float8_e5m2" in row.kv_dtypes for row in RECORDS["fa3"].rows)


def test_flashmla_reads_pages_of_64_on_sm90_alone() -> None:
    for row in RECORDS["flashmla"].rows:
        assert row.architectures == ("cuda:sm90",)
        assert [p for p in (1, 16, 32, 64, 128) if row.pages.allows(p)] == [64]
        assert row.form.kernel_page == 64
        assert Phase.PREFILL not in row.phases


@pytest.mark.parametrize(
    ("phase", "kv", "pages"),
    [
        (Phase.DECODE, "bfloat16", [16, 32, 64]),
        (Phase.PREFILL, "bfloat16", [32, 64]),
        (Phase.DECODE, "float8_e4m3fn", [64]),
        (Phase.PREFILL, "float8_e4m3fn", [32, 64]),
    ],
)
def test_hpc_ops_page_sets(phase: Phase, kv: str, pages: list[int]) -> None:
    found = [r for r in RECORDS["hpc_ops"].rows if phase in r.phases and kv in r.kv_dtypes]
    assert len(found) == 1
    assert [p for p in (1, 16, 32, 48, 64, 128, 256) if found[0].pages.allows(p)] == pages
    assert found[0].architectures == ("cuda:sm90",)


def test_hpc_ops_promises_nothing_it_lacks() -> None:
    for row in RECORDS["hpc_ops"].rows:
        assert set(row.features) <= {Feature.KV_SCALES}
        assert row.head_dims.pairs == ((128, 128),)


def test_flashinfer_sinks_only_from_07_and_in_their_own_rows() -> None:
    sinks = [row for row in RECORDS["flashinfer"].rows if Feature.SINKS in row.features]
    assert sinks
    for row in sinks:
        assert {p.versions for p in row.providers} == {">=0.7"}
        assert not {Feature.LOGIT_CAP, Feature.LSE, Feature.EXPLICIT_MASK} & set(row.features)
        assert not FP8 & set(row.kv_dtypes)


def test_flashinfer_window_is_not_promised_where_later_keys_are_visible() -> None:
    for row in RECORDS["flashinfer"].rows:
        if Feature.BIDIRECTIONAL in row.features or Feature.CROSS in row.features:
            assert Feature.WINDOW not in row.features


def test_flashinfer_fp8_kv_never_runs_on_fa3_for_dense_models() -> None:
    for row in rows("flashinfer", "cuda:sm90", kind=ModelKind.DENSE):
        if row.method.startswith("fa3"):
            assert not FP8 & set(row.kv_dtypes)


def test_flashinfer_xqa_mla_is_for_128_heads() -> None:
    found = [r for r in RECORDS["flashinfer"].rows if r.method == "xqa MLA"]
    assert {a for r in found for a in r.architectures} == {"cuda:sm120", "cuda:sm121"}
    assert all(r.q_heads == (128,) for r in found)


def test_trtllm_mla_refuses_65_to_127_heads() -> None:
    for row in RECORDS["trtllm_mla"].rows:
        assert 64 in row.q_heads
        assert 128 in row.q_heads
        assert not set(range(65, 128)) & set(row.q_heads)


def test_trtllm_gen_lists_no_page_beyond_64() -> None:
    for row in RECORDS["trtllm_mha"].rows:
        if row.method.startswith("trtllm-gen"):
            assert not row.pages.allows(128)


@pytest.mark.parametrize("chip", ["gfx90a", "gfx1100", "gfx1151", "gfx1200", "gfx1201"])
def test_aiter_only_where_its_binaries_run(chip: str) -> None:
    assert not list(rows("aiter", f"rocm:{chip}"))


@pytest.mark.parametrize("chip", ["gfx1100", "gfx1151", "gfx1200", "gfx1201"])
def test_wave_is_for_cdna(chip: str) -> None:
    assert not list(rows("wave", f"rocm:{chip}"))


def test_fp8_kind_follows_the_chip_on_amd() -> None:
    for name in ("aiter", "triton"):
        for row in rows(name, "rocm:gfx942"):
            assert FP8 & set(row.kv_dtypes) <= {"float8_e4m3fnuz"}
        for row in rows(name, "rocm:gfx950"):
            assert "float8_e4m3fnuz" not in row.kv_dtypes


def test_aiter_mla_counts_heads_and_tokens() -> None:
    found = list(rows("aiter", "rocm:gfx942", Phase.DECODE, ModelKind.MLA))
    assert {h for r in found for h in r.q_heads} == {8, 16, 32, 64, 128}
    assert all(r.form.kind == "token_csr" and r.form.kernel_page == 1 for r in found)
    assert {h for r in found if r.degraded is None for h in r.q_heads} == {16, 128}


def test_aiter_pads_the_indices_that_batch_prefill_overreads() -> None:
    found = [r for r in RECORDS["aiter"].rows if r.method.startswith("mha_batch_prefill")]
    assert found
    assert all(r.form.index_slack == 128 for r in found)
    assert not any(r.head_dims.allows(64, 64) for r in found)


def test_wave_has_no_window_sinks_or_lse() -> None:
    for chip in ("rocm:gfx942", "rocm:gfx950", "rocm:gfx90a"):
        assert not {Feature.WINDOW, Feature.SINKS, Feature.LSE} & features("wave", chip)


def test_ascend_pages_are_128_and_its_band_is_called_unproven() -> None:
    for row in RECORDS["ascend"].rows:
        assert [p for p in (1, 16, 64, 128, 256) if row.pages.allows(p)] == [128]
        if Feature.WINDOW in row.features:
            assert row.degraded is not None


def test_310p_is_fp16_and_nz() -> None:
    found = list(rows("ascend", "ascend:310p"))
    assert found
    assert all(r.dtypes == ("float16",) and r.layouts == ("NZ",) for r in found)


def test_triton_e4m3_needs_sm89() -> None:
    for chip in ("cuda:sm80", "cuda:sm86"):
        assert not any("float8_e4m3fn" in r.kv_dtypes for r in rows("triton", chip))
    assert any("float8_e4m3fn" in r.kv_dtypes for r in rows("triton", "cuda:sm89"))


def test_ipex_wants_its_torch_and_is_called_slow() -> None:
    found = [r for r in RECORDS["intel_amx"].rows if r.method.startswith("IPEX")]
    assert found
    for row in found:
        assert row.degraded is not None
        assert [(p.distribution, p.versions) for p in row.requires] == [("torch", "==2.8.*")]


def test_vllm_cpu_pages_and_pool() -> None:
    found = [r for r in RECORDS["intel_amx"].rows if r.method.startswith("vllm-cpu")]
    assert found
    for row in found:
        assert row.layouts == (f"CPU_{row.method.split()[1].upper()}",)
        assert [(p.distribution, p.versions) for p in row.requires] == [("torch", "==2.13.*")]
        assert not row.pages.allows(1)
        if row.method != "vllm-cpu vec16":
            assert not row.pages.allows(16)
            assert not row.head_dims.allows(80, 80)


def test_mla_rows_read_the_latent() -> None:
    for record in records():
        for row in record.rows:
            if row.kinds == (ModelKind.MLA,) and Phase.DECODE in row.phases:
                assert row.head_dims.allows(576, 512), record.name
                if record.name != "torch_native":  # the reference takes latents of any size
                    assert not row.head_dims.allows(128, 128), record.name
