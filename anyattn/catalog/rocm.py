"""Records of the AMD families: `aiter` and `wave`, both for CDNA alone and for exact chips."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import ANY_PAGE, DECODE, DRAFT, HALVES, NHD, PREFILL, VERIFY, per_dtype, square
from anyattn.catalog.rocm_aiter import ROWS as AITER_ROWS
from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    Provider,
)

__all__ = ["RECORDS"]

_TOKENS = FormSpec("token_csr", kernel_page=1)

_WAVE: dict[str, Any] = {
    "providers": (Provider("wave-lang", ">=3.9.1,<3.10", ("wave_lang",)),),
    "pages": ANY_PAGE,
    "form": _TOKENS,
    "layouts": (NHD,),
    "features": (Feature.LOGIT_CAP, Feature.CUSTOM_SCALE),
}


def _wave(architectures: tuple[str, ...], degraded: str | None) -> tuple[CapabilityRow, ...]:
    return (
        *per_dtype(
            *HALVES,
            phases=(DECODE,),
            architectures=architectures,
            head_dims=HeadDims(pairs=square(64, 80, 128, 256)),
            group_sizes=(1, 4, 7, 8, 16, 24),
            host_lengths=0,
            graph=1,
            degraded=degraded,
            method="paged decode template",
            source="vendor-apis §14.1 to §14.4",
            **_WAVE,
        ),
        *per_dtype(
            *HALVES,
            phases=(PREFILL, VERIFY, DRAFT),
            architectures=architectures,
            head_dims=HeadDims(pairs=square(64, 80, 128)),
            group_sizes=(1, 4, 8),
            host_lengths=1,
            graph=0,
            degraded=degraded,
            method="extend template",
            source="vendor-apis §14.1 to §14.3; tree masks: the template could, nobody does",
            **{**_WAVE, "features": (*_WAVE["features"], Feature.RAGGED_VERIFY)},
        ),
    )


RECORDS = (
    BackendRecord(
        name="aiter",
        summary="AMD's AITER on gfx942 and gfx950: HIP and CK kernels, its Triton unified attention, MLA",
        rows=AITER_ROWS,
        targets={
            ModelKind.DENSE: "anyattn.backends.rocm.aiter:AiterAttention",
            ModelKind.MLA: "anyattn.backends.rocm.aiter_mla:AiterMLA",
        },
    ),
    BackendRecord(
        name="wave",
        summary="Wave DSL templates on CDNA: token indices, no window, sinks, scales or LSE",
        rows=(
            *_wave(arch.GFX942_950, None),
            *_wave(arch.GFX90A, "compiled for gfx90a, never seen to run there"),
        ),
        targets={ModelKind.DENSE: "anyattn.backends.rocm.wave:WaveAttention"},
    ),
)
