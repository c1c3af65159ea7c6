"""Every reason code at least once, and that the nearest row tells the reasons."""

from __future__ import annotations

import dataclasses

import pytest
from select_fakes import HALVES, KLIB, SPEC, host, library, record, reference, request, row

from anyattn.core.capabilities import (
    BackendRecord,
    Feature,
    HeadDims,
    ModelKind,
    PageSizes,
    Phase,
    Provider,
)
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.select.decision import Accepted, Degraded, Reason, ReasonCode, Rejected
from anyattn.core.select.request import Request
from anyattn.core.select.validate import host_verdict, validate
from anyattn.core.spec import AttentionKind, AttentionSpec, MLASpec

DECODE, PREFILL = Phase.DECODE, Phase.PREFILL
MLA = AttentionSpec(num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=0.07, mla=MLASpec())


def reasons(
    entry: BackendRecord, asked: Request | None = None, facts: HostFacts | None = None, phase: Phase = DECODE
) -> tuple[Reason, ...]:
    verdict = validate(entry, phase, asked or request(), facts or host())
    assert isinstance(verdict, Rejected), verdict
    return verdict.reasons


def codes(*args: object, **fields: object) -> set[ReasonCode]:
    return {r.code for r in reasons(*args, **fields)}  # type: ignore[arg-type]


def spec(**fields: object) -> AttentionSpec:
    return dataclasses.replace(SPEC, **fields)  # type: ignore[arg-type]


def test_a_fitting_row_is_accepted() -> None:
    assert validate(record("a"), DECODE, request(), host()) == Accepted()


def test_phase() -> None:
    (reason,) = reasons(record("a", row(phases=(PREFILL,)), row(phases=(Phase.VERIFY,))))
    assert (reason.code, reason.asked) == (ReasonCode.PHASE, "decode")
    assert reason.allowed == "prefill, verify"


def test_model_kind() -> None:
    (reason,) = reasons(record("a", row(kinds=(ModelKind.MLA,))))
    assert (reason.code, reason.asked, reason.allowed) == (ReasonCode.MODEL_KIND, "dense", "mla")


def test_architecture_is_exact() -> None:
    (reason,) = reasons(record("a"), facts=host("x10"))
    assert (reason.code, reason.asked) == (ReasonCode.ARCHITECTURE, "cuda:x10")
    assert reason.allowed == "cuda:x1, cuda:x2"
    assert codes(record("a"), facts=host("x1", platform="rocm")) == {ReasonCode.ARCHITECTURE}


def test_a_row_for_another_chip_says_nothing_about_the_request() -> None:
    entry = record("a", row(architectures=("cuda:x9",)), row(dtypes=("float32",)))
    assert codes(entry) == {ReasonCode.DTYPE}


def test_library_missing() -> None:
    (reason,) = reasons(record("a", row(providers=(KLIB,))))
    assert (reason.code, reason.allowed) == (ReasonCode.LIBRARY_MISSING, "klib>=2.0,<3")
    assert "klib" in reason.hint
    other = Provider("olib", ">=1")
    (reason,) = reasons(record("a", row(providers=(KLIB, other))))
    assert reason.allowed == "klib>=2.0,<3 or olib>=1"


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.0", True),
        ("2.1rc1", True),
        ("2.1.dev3+g12ab", True),
        ("2.0rc1", False),
        ("3.0", False),
        ("junk", False),
    ],
)
def test_library_version(version: str, fits: bool) -> None:
    entry, facts = record("a", row(providers=(KLIB,))), host("x1", library(version))
    verdict = validate(entry, DECODE, request(), facts)
    assert isinstance(verdict, Accepted) is fits
    if not fits:
        assert codes(entry, None, facts) == {ReasonCode.LIBRARY_VERSION}


def test_an_unknown_version_passes_only_where_the_host_is_simulated() -> None:
    entry = record("a", row(providers=(KLIB,)))
    assert codes(entry, None, host("x1", library(None))) == {ReasonCode.LIBRARY_VERSION}
    assert validate(entry, DECODE, request(), host("x1", library(None), simulated=True)) == Accepted()


def test_library_broken() -> None:
    facts = host("x1", library(state=LibraryState.BROKEN, reason="undefined symbol: foo"))
    (reason,) = reasons(record("a", row(providers=(KLIB,))), facts=facts)
    assert reason.code is ReasonCode.LIBRARY_BROKEN
    assert "undefined symbol: foo" in reason.hint


def test_library_shadowed_by_another_owner() -> None:
    facts = host("x1", library(modules=()), LibraryFacts("thief", "1.0", ("klib",)))
    (reason,) = reasons(record("a", row(providers=(KLIB,))), facts=facts)
    assert (reason.code, reason.asked) == (ReasonCode.LIBRARY_SHADOWED, "module klib of thief")
    assert "uninstall thief" in reason.hint


def test_library_shadowed_by_somebody_unknown() -> None:
    facts = host("x1", library(modules=(), reason="module klib is shadowed by ./klib.py"))
    (reason,) = reasons(record("a", row(providers=(KLIB,))), facts=facts)
    assert (reason.code, reason.hint) == (
        ReasonCode.LIBRARY_SHADOWED,
        "module klib is shadowed by ./klib.py",
    )


def test_any_provider_will_do_but_all_requirements_must() -> None:
    other = Provider("olib", "", ("olib",))
    entry = record("a", row(providers=(Provider("nolib"), KLIB), requires=(other,)))
    assert codes(entry, None, host("x1", library())) == {ReasonCode.LIBRARY_MISSING}
    both = host("x1", library(), LibraryFacts("olib", "0.1", ("olib",)))
    assert validate(entry, DECODE, request(), both) == Accepted()


def test_the_nearest_provider_is_named() -> None:
    entry = record("a", row(providers=(Provider("nolib"), KLIB)))
    assert codes(entry, None, host("x1", library("1.0"))) == {ReasonCode.LIBRARY_VERSION}


def test_runtime_version() -> None:
    entry = record("a", row(runtime=">=12.8"))
    (reason,) = reasons(entry, facts=host(runtime="12.4"))
    assert (reason.code, reason.allowed) == (ReasonCode.RUNTIME_VERSION, ">=12.8")
    assert codes(entry, None, host(runtime=None)) == {ReasonCode.RUNTIME_VERSION}
    assert validate(entry, DECODE, request(), host(runtime="13.0")) == Accepted()
    assert validate(entry, DECODE, request(), host(runtime=None, simulated=True)) == Accepted()


def test_head_dim() -> None:
    (reason,) = reasons(record("a"), request(spec(head_dim=80, v_head_dim=80, scale=0.0)))
    assert (reason.code, reason.asked, reason.allowed) == (ReasonCode.HEAD_DIM, "80", "64, 128")
    entry = record("a", row(head_dims=HeadDims(pairs=((192, 128),), maximum=128)))
    assert (
        validate(entry, DECODE, request(spec(head_dim=192, v_head_dim=128, scale=0.0)), host()) == Accepted()
    )
    assert codes(entry, request(spec(head_dim=64, v_head_dim=128, scale=0.0))) == {ReasonCode.HEAD_DIM}


def test_mla_prefill_may_be_materialised_and_decode_may_not() -> None:
    kinds = (ModelKind.MLA,)
    latent = record("a", row(kinds=kinds, head_dims=HeadDims(pairs=((576, 512),))))
    full = record("b", row(kinds=kinds, head_dims=HeadDims(pairs=((192, 128),))))
    for phase in (PREFILL, DECODE):
        assert validate(latent, phase, request(MLA), host()) == Accepted()
    assert validate(full, PREFILL, request(MLA), host()) == Accepted()
    (reason,) = reasons(full, request(MLA))
    assert (reason.code, reason.asked) == (ReasonCode.HEAD_DIM, "(576, 512)")


def test_an_mla_layer_has_one_kv_head_and_its_own_scale() -> None:
    entry = record(
        "a",
        row(kinds=(ModelKind.MLA,), head_dims=HeadDims(pairs=((576, 512),)), kv_heads=(1,), q_heads=(128,)),
    )
    many = dataclasses.replace(MLA, num_kv_heads=128)
    assert validate(entry, DECODE, request(many), host()) == Accepted()


@pytest.mark.parametrize(
    ("limit", "asked"),
    [
        ({"group_sizes": (1, 8)}, "4 query heads per KV head"),
        ({"q_heads": (16,)}, "32 query heads"),
        ({"kv_heads": (1, 2)}, "8 KV heads"),
    ],
)
def test_head_count(limit: dict[str, object], asked: str) -> None:
    (reason,) = reasons(record("a", row(**limit)))
    assert (reason.code, reason.asked) == (ReasonCode.HEAD_COUNT, asked)


def test_dtype_reasons_look_at_all_rows_for_the_chip() -> None:
    entry = record("a", *(row(dtypes=(d,), kv_dtypes=(d,)) for d in HALVES))
    (reason,) = reasons(entry, request(dtype="float32"))
    assert reason.code is ReasonCode.DTYPE
    assert reason.allowed == "bfloat16, float16"


def test_kv_dtype() -> None:
    (reason,) = reasons(record("a"), request(kv_dtype="float8_e4m3fn"))
    assert (reason.code, reason.asked) == (ReasonCode.KV_DTYPE, "float8_e4m3fn")
    both = request(dtype="float32", kv_dtype="int8")
    assert codes(record("a"), both) == {ReasonCode.DTYPE, ReasonCode.KV_DTYPE}
    assert codes(record("a"), request(dtype="float32")) == {ReasonCode.DTYPE}


def test_kv_dtype_allowed_for_this_model_dtype() -> None:
    entry = record("a", row(dtypes=("bfloat16",)), row(dtypes=("float16",), kv_dtypes=("int8",)))
    (reason,) = reasons(entry, request(kv_dtype="int8"))
    assert (reason.code, reason.allowed) == (ReasonCode.KV_DTYPE, "bfloat16, float16")


def test_page_size() -> None:
    entry = record("a", row(pages=PageSizes((16, 64))))
    (reason,) = reasons(entry, request(page_size=24))
    assert (reason.code, reason.asked) == (ReasonCode.PAGE_SIZE, "24")
    assert "16, 64" in reason.allowed
    assert validate(entry, DECODE, request(page_size=32), host()) == Accepted()  # two kernel pages of 16
    assert codes(record("a", row(pages=PageSizes((16,)), layouts=("HND",))), request(page_size=32)) == {
        ReasonCode.PAGE_SIZE
    }


def test_layout() -> None:
    assert codes(record("a"), request(layout="HND", page_size=64)) == {ReasonCode.LAYOUT}


@pytest.mark.parametrize(
    ("layer", "feature"),
    [
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"sinks": True}, "sinks"),
        ({"scale": 0.5}, "custom_scale"),
        ({"kind": AttentionKind.CROSS}, "cross"),
        ({"kind": AttentionKind.ENCODER_ONLY}, "encoder_only"),
        ({"kind": AttentionKind.BIDIRECTIONAL}, "bidirectional"),
    ],
)
def test_feature_of_a_layer(layer: dict[str, object], feature: str) -> None:
    (reason,) = reasons(record("a"), request(spec(**layer)))
    assert (reason.code, reason.asked, reason.allowed) == (ReasonCode.FEATURE, feature, "lse, window")
    assert isinstance(validate(reference(), DECODE, request(spec(**layer)), host()), Degraded)


def test_every_missing_feature_is_named() -> None:
    asked = request(
        spec(sinks=True, sliding_window=128), features=frozenset({Feature.KV_SCALES, Feature.LSE})
    )
    assert [r.asked for r in reasons(record("a"), asked)] == ["kv_scales", "sinks"]


def test_one_row_must_take_all_layers() -> None:
    small, large = HeadDims(pairs=((64, 64),)), HeadDims(pairs=((128, 128),))
    layers = (SPEC, spec(head_dim=64, v_head_dim=64, scale=0.0))
    assert codes(record("a", row(head_dims=small), row(head_dims=large)), request(*layers)) == {
        ReasonCode.HEAD_DIM
    }
    assert validate(record("a"), DECODE, request(*layers), host()) == Accepted()


def test_a_model_of_mla_and_dense_layers_needs_a_row_for_both() -> None:
    entry = record("a", row(kinds=(ModelKind.MLA,)), row())
    assert codes(entry, request(SPEC, MLA)) == {ReasonCode.MODEL_KIND}


def test_determinism() -> None:
    (reason,) = reasons(record("a", row(determinism=1)), request(deterministic=2))
    assert (reason.code, reason.asked) == (ReasonCode.DETERMINISM, "batch-invariant")
    assert validate(record("a", row(determinism=2)), DECODE, request(deterministic=1), host()) == Accepted()


def test_not_built_on_a_real_host_only() -> None:
    entry = record("a", built=False)
    assert codes(entry) == {ReasonCode.NOT_BUILT}
    assert validate(entry, DECODE, request(), host(simulated=True)) == Accepted()
    dense = record(
        "b", row(kinds=(ModelKind.DENSE, ModelKind.MLA), head_dims=HeadDims(maximum=600, equal=False))
    )
    dense.targets.pop(ModelKind.MLA)
    assert codes(dense, request(MLA)) == {ReasonCode.NOT_BUILT}


def test_a_better_row_of_the_same_backend_wins() -> None:
    entry = record("a", row(degraded="slow path"), row(method="fast"))
    assert validate(entry, DECODE, request(), host()) == Accepted()
    verdict = validate(record("a", row(degraded="slow path")), DECODE, request(), host())
    assert isinstance(verdict, Degraded)
    assert (verdict.reason.code, verdict.reason.allowed) == (ReasonCode.DEGRADED, "slow path")


def test_host_verdict_needs_no_model() -> None:
    entry = record("a", row(kinds=(ModelKind.MLA,), providers=(KLIB,), phases=(DECODE,)))
    assert host_verdict(entry, DECODE, host("x1", library())) == Accepted()
    missing = host_verdict(entry, DECODE, host())
    assert isinstance(missing, Rejected)
    assert [r.code for r in missing.reasons] == [ReasonCode.LIBRARY_MISSING]
    other = host_verdict(entry, PREFILL, host())
    assert isinstance(other, Rejected)
    assert [r.code for r in other.reasons] == [ReasonCode.PHASE]
    elsewhere = host_verdict(entry, DECODE, host("x7"))
    assert isinstance(elsewhere, Rejected)
    assert [r.code for r in elsewhere.reasons] == [ReasonCode.ARCHITECTURE]
