"""`torch_native`: the reference, every feature in plain torch. The floor under every platform."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import ANY_PAGE, DECODE, DRAFT, E4M3, E4M3_FNUZ, E5M2, HND, NHD, PREFILL, VERIFY
from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    Proof,
)

__all__ = ["RECORDS"]

_DTYPES = ("float32", "bfloat16", "float16")

_EVERYWHERE: dict[str, Any] = {
    "phases": (PREFILL, DECODE, VERIFY, DRAFT),
    "head_dims": HeadDims(maximum=1024, equal=False),
    "dtypes": _DTYPES,
    "kv_dtypes": (*_DTYPES, E4M3, E4M3_FNUZ, E5M2),
    "pages": ANY_PAGE,
    "form": FormSpec("token_csr", kernel_page=1, index_dtype="int64"),
    "layouts": (NHD, HND),
    "features": (
        Feature.WINDOW,
        Feature.LOGIT_CAP,
        Feature.SINKS,
        Feature.LSE,
        Feature.EXPLICIT_MASK,
        Feature.TREE_VERIFY,
        Feature.RAGGED_VERIFY,
        Feature.BIDIRECTIONAL,
        Feature.ENCODER_ONLY,
        Feature.CROSS,
        Feature.CUSTOM_SCALE,
        Feature.KV_SCALES,
        Feature.NO_CACHE_WRITE,
    ),
    "determinism": 1,
    "host_lengths": 2,
    "graph": 0,
    "tolerates_nan_tail": True,
}

_MLA: dict[str, Any] = {
    **_EVERYWHERE,
    "kinds": (ModelKind.MLA,),
    "features": (
        Feature.WINDOW,
        Feature.LOGIT_CAP,
        Feature.SINKS,
        Feature.LSE,
        Feature.EXPLICIT_MASK,
        Feature.TREE_VERIFY,
        Feature.RAGGED_VERIFY,
        Feature.CUSTOM_SCALE,
        Feature.KV_SCALES,
        Feature.NO_CACHE_WRITE,
        Feature.Q_ROPE,
    ),
}

_CUDA_UNTRIED = tuple(chip for chip in arch.CUDA if chip not in arch.SM90)

_ROWS = (
    CapabilityRow(
        architectures=arch.CPU,
        method="gather + folded SDPA",
        proof=Proof.CPU,
        source="design §2, hardware-free-checks §2, §4; bit equality over re-chunkings: tests/backends",
        **{**_EVERYWHERE, "determinism": 2},  # tiles of fixed place and shape, where it is asked for
    ),
    CapabilityRow(
        architectures=arch.SM90,
        method="gather + SDPA",
        degraded="reference, not a fast path",
        proof=Proof.HARDWARE,
        source="plain torch operators; judged in full on an H200 (docs/h200.md)",
        **_EVERYWHERE,
    ),
    CapabilityRow(
        architectures=(
            *_CUDA_UNTRIED,
            *arch.ROCM,
            *arch.ASCEND_910,
            *arch.ASCEND_310P,
            *arch.ANY_ACCELERATOR,
        ),
        method="gather + SDPA",
        degraded="reference, not a fast path",
        source="plain torch operators; not run on these accelerators, nor fp8 conversion on Ascend",
        **_EVERYWHERE,
    ),
    CapabilityRow(
        architectures=arch.CPU,
        method="gather, absorbed or materialised",
        proof=Proof.CPU,
        source="arXiv 2405.04434; judged against float64 attention over expanded keys",
        **_MLA,
    ),
    CapabilityRow(
        architectures=(*arch.CUDA, *arch.ROCM, *arch.ASCEND_910, *arch.ASCEND_310P, *arch.ANY_ACCELERATOR),
        method="gather, absorbed or materialised",
        degraded="reference, not a fast path",
        source="plain torch operators; not run on accelerators yet",
        **{**_MLA, "layouts": (NHD, HND, "SPLIT", "NZ")},  # reads slots, wherever they lie
    ),
)

RECORDS = (
    BackendRecord(
        name="torch_native",
        summary="the reference: every feature, any device, float32 accumulation",
        rows=_ROWS,
        targets={
            ModelKind.DENSE: "anyattn.backends.reference.torch_native:TorchNative",
            ModelKind.MLA: "anyattn.backends.reference.torch_native_mla:TorchNativeMLA",
        },
    ),
)
