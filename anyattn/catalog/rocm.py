"""Records of the AMD families: `aiter` and `wave`, both for CDNA alone and for exact chips."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    E4M3,
    E4M3_FNUZ,
    HALVES,
    LATENT,
    MATERIALISED,
    NHD,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Provider,
)

__all__ = ["RECORDS"]

# The PyPI wheel is a year older than what engines build; `main` is known by its tag v0.1.20.
_AITER = (Provider("amd-aiter", ">=0.1.7.dev0", ("aiter",)),)
_AITER_MAIN = (Provider("amd-aiter", ">=0.1.20.dev0", ("aiter",)),)

_TOKENS = FormSpec("token_csr", kernel_page=1)
_PADDED_TOKENS = FormSpec("token_csr", kernel_page=1, index_slack=128)
"""`mha_batch_prefill_func` reads past the last index."""

_CALLED = (Feature.WINDOW, Feature.LOGIT_CAP, Feature.CUSTOM_SCALE)


def _aiter_dense(architectures: tuple[str, ...], fp8: str) -> tuple[CapabilityRow, ...]:
    """MHA on one chip, whose fp8 kind the other can't read."""
    chip: dict[str, Any] = {"architectures": architectures, "layouts": (NHD,), "graph": 1}
    decode: dict[str, Any] = {
        "phases": (DECODE,),
        "head_dims": HeadDims(pairs=square(64, 128, 256)),
        "pages": PageSizes((16, 32)),
        "form": block_table(),
        "host_lengths": 1,
        "method": "paged_attention_v1",
        "source": "vendor-apis §7.1, §7.4, §1.4",
    }
    unified: dict[str, Any] = {
        "phases": (PREFILL, DECODE, VERIFY, DRAFT),
        "pages": PageSizes((16, 32, 64, 128)),
        "form": block_table(),
        "host_lengths": 1,
        "method": "unified_attention (Triton)",
    }
    sinks = (*_CALLED, Feature.SINKS, Feature.RAGGED_VERIFY)
    # CK has no paged kernel for D 64 on gfx950 (ROCm/aiter#5160); gfx942 isn't reported either way.
    return (
        *per_dtype(*HALVES, providers=_AITER, features=_CALLED, **decode, **chip),
        *per_dtype(
            *HALVES,
            fp8=(fp8,),
            same=False,
            providers=_AITER,
            features=(*_CALLED, Feature.KV_SCALES),
            **decode,
            **chip,
        ),
        *per_dtype(
            *HALVES,
            phases=(PREFILL, VERIFY),
            providers=_AITER,
            head_dims=HeadDims(pairs=square(128, 256)),
            pages=ANY_PAGE,
            form=_PADDED_TOKENS,
            features=(*_CALLED, Feature.LSE, Feature.RAGGED_VERIFY),
            host_lengths=1,
            method="mha_batch_prefill, token indices",
            source="vendor-apis §7.2, §7.4; D 64: ROCm/aiter#5160",
            **chip,
        ),
        *per_dtype(
            *HALVES,
            phases=(PREFILL,),
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64)),
            pages=ANY_PAGE,
            form=_TOKENS,
            features=(*_CALLED, Feature.LSE),
            host_lengths=2,
            method="flash_attn_varlen on gathered prefix",
            source="vendor-apis §7.4 (vLLM's extend: gather, varlen per chunk, merge)",
            **{**chip, "graph": 0},
        ),
        *per_dtype(
            *HALVES,
            fp8=(fp8,),
            same=False,
            phases=(PREFILL, VERIFY),
            providers=_AITER_MAIN,
            head_dims=HeadDims(pairs=square(128)),
            pages=ANY_PAGE,
            form=_PADDED_TOKENS,
            features=(*_CALLED, Feature.KV_SCALES, Feature.RAGGED_VERIFY),
            host_lengths=1,
            method="mha_batch_prefill, fp8 KV",
            source="vendor-apis §7.2: descales on main, not on PyPI",
            **chip,
        ),
        *per_dtype(
            *HALVES,
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=sinks,
            source="vendor-apis §7.2, §7.4: causal only; within 5 % of the CK path (other-systems D1)",
            **unified,
            **chip,
        ),
        *per_dtype(
            *HALVES,
            fp8=(fp8,),
            same=False,
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=(*sinks, Feature.KV_SCALES),
            source="vendor-apis §7.2 (k_descale, v_descale), §7 (fp8 kind by chip)",
            **unified,
            **chip,
        ),
        *per_dtype(
            *HALVES,
            providers=_AITER_MAIN,
            head_dims=HeadDims(pairs=square(512)),
            features=sinks,
            source="sglang#38757, ROCm/aiter#5649 (D 512 on main)",
            **unified,
            **chip,
        ),
    )


def _aiter_mla(architectures: tuple[str, ...], fp8: str) -> tuple[CapabilityRow, ...]:
    """MLA is token-granular: a page in its table gave 0.005 for 0.975 on gsm8k (sglang#25556)."""
    decode: dict[str, Any] = {
        "kinds": (ModelKind.MLA,),
        "architectures": architectures,
        "providers": _AITER,
        "head_dims": HeadDims(pairs=(LATENT,)),
        "pages": ANY_PAGE,
        "form": _TOKENS,
        "layouts": (NHD,),
        "host_lengths": 1,
        "graph": 1,
        "phases": (DECODE, VERIFY, DRAFT),
    }
    return (
        *per_dtype(
            "bfloat16",
            fp8=(fp8,),
            q_heads=(16, 128),
            features=(Feature.CUSTOM_SCALE, Feature.KV_SCALES),
            method="mla_decode_fwd",
            source="vendor-apis §7.3; sglang-facts §4.1 (aiter for 16 and 128 heads)",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            fp8=(fp8,),
            q_heads=(8, 32, 64),
            features=(Feature.CUSTOM_SCALE, Feature.KV_SCALES),
            degraded="engines take AITER for 16 and 128 heads, Triton for this count",
            method="mla_decode_fwd",
            source="vendor-apis §7.3 (8, 16, 32, 64, 128), sglang-facts §4.1; padded 4 and 12: left out",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            kinds=(ModelKind.MLA,),
            phases=(PREFILL,),
            architectures=architectures,
            providers=_AITER,
            head_dims=HeadDims(pairs=(MATERIALISED,)),
            pages=ANY_PAGE,
            form=_TOKENS,
            layouts=(NHD,),
            features=(Feature.LSE, Feature.CUSTOM_SCALE),
            host_lengths=2,
            method="flash_attn_varlen, materialised",
            source="vendor-apis §7.3, §7.4; fp8 latent in prefill: no fact",
        ),
    )


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
            phases=(PREFILL, VERIFY),
            architectures=architectures,
            head_dims=HeadDims(pairs=square(64, 80, 128)),
            group_sizes=(1, 4, 8),
            host_lengths=1,
            graph=0,
            degraded=degraded,
            method="extend template",
            source="vendor-apis §14.1 to §14.3; tree masks: the template could, nobody does",
            **_WAVE,
        ),
    )


RECORDS = (
    BackendRecord(
        name="aiter",
        summary="AMD's AITER on gfx942 and gfx950: HIP and CK kernels, its Triton unified attention, MLA",
        rows=(
            *_aiter_dense(arch.GFX942, E4M3_FNUZ),
            *_aiter_dense(arch.GFX950, E4M3),
            *_aiter_mla(arch.GFX942, E4M3_FNUZ),
            *_aiter_mla(arch.GFX950, E4M3),
        ),
    ),
    BackendRecord(
        name="wave",
        summary="Wave DSL templates on CDNA: token indices, no window, sinks, scales or LSE",
        rows=(
            *_wave(arch.GFX942_950, None),
            *_wave(arch.GFX90A, "compiled for gfx90a, never seen to run there"),
        ),
    ),
)
