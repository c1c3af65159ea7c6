"""Rows of `aiter`, by exact chip: fp8 of one can't be read on the other."""

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
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Provider,
)

__all__ = ["ROWS"]

# The PyPI wheel is a year older than what engines build; `main` is known by its tag v0.1.20.
_AITER = (Provider("amd-aiter", ">=0.1.7.dev0", ("aiter",)),)
_AITER_MAIN = (Provider("amd-aiter", ">=0.1.20.dev0", ("aiter",)),)

_TOKENS = FormSpec("token_csr", kernel_page=1)
_PADDED_TOKENS = FormSpec("token_csr", kernel_page=1, index_slack=128)
"""`mha_batch_prefill_func` reads past the last index."""

_VECTORISED = "VECTORISED_5D"
"""K `[N, Hkv, D/x, P, x]`, V `[N, Hkv, P/x, D, x]` of 16-byte chunks."""

_CALLED = (Feature.WINDOW, Feature.LOGIT_CAP, Feature.CUSTOM_SCALE)


def _paged_decode(chip: dict[str, Any], fp8: str) -> tuple[CapabilityRow, ...]:
    """`paged_attention_v1` hides keys beyond the window before it caps, which uncovers them: never both."""
    common: dict[str, Any] = {
        **chip,
        "phases": (DECODE,),
        "providers": _AITER,
        "head_dims": HeadDims(pairs=square(64, 128, 256)),
        "group_sizes": tuple(range(1, 17)),
        "pages": PageSizes((16, 32)),
        "form": block_table(),
        "host_lengths": 1,
        "method": "paged_attention_v1",
        "source": "vendor-apis §7.1, §7.4, §1.4; pa_kernels.cuh (window before cap), pa_v1.py (groups to 16)",
    }
    return tuple(
        row
        for feature in (Feature.WINDOW, Feature.LOGIT_CAP)
        for row in (
            *per_dtype(*HALVES, features=(feature, Feature.CUSTOM_SCALE), **common),
            *per_dtype(
                *HALVES,
                fp8=(fp8,),
                same=False,
                features=(feature, Feature.CUSTOM_SCALE, Feature.KV_SCALES),
                **common,
            ),
        )
    )


def _batch_prefill(chip: dict[str, Any], fp8: str) -> tuple[CapabilityRow, ...]:
    """CK has no paged kernel for D 64 on gfx950 (ROCm/aiter#5160); gfx942 isn't reported either way."""
    common: dict[str, Any] = {
        **chip,
        "phases": (PREFILL, VERIFY),
        "pages": ANY_PAGE,
        "form": _PADDED_TOKENS,
        "host_lengths": 1,
    }
    return (
        *per_dtype(
            *HALVES,
            providers=_AITER,
            head_dims=HeadDims(pairs=square(128, 256)),
            features=(*_CALLED, Feature.LSE, Feature.RAGGED_VERIFY),
            method="mha_batch_prefill, token indices",
            source="vendor-apis §7.2, §7.4; D 64: ROCm/aiter#5160",
            **common,
        ),
        *per_dtype(
            *HALVES,
            fp8=(fp8,),
            same=False,
            providers=_AITER_MAIN,
            head_dims=HeadDims(pairs=square(128)),
            features=(*_CALLED, Feature.KV_SCALES, Feature.RAGGED_VERIFY),
            method="mha_batch_prefill, fp8 KV",
            source="vendor-apis §7.2: descales on main, not on PyPI",
            **common,
        ),
    )


def _unified(chip: dict[str, Any], fp8: str) -> tuple[CapabilityRow, ...]:
    """Tiles of 64 keys read the table's cells to their end, so rows of it are multiples of that."""
    common: dict[str, Any] = {
        **chip,
        "phases": (PREFILL, DECODE, VERIFY, DRAFT),
        "pages": PageSizes((16, 32, 64, 128)),
        "form": block_table(width_multiple=4),
        "host_lengths": 1,
        "method": "unified_attention (Triton)",
    }
    sinks = (*_CALLED, Feature.SINKS, Feature.RAGGED_VERIFY)
    return (
        *per_dtype(
            *HALVES,
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=sinks,
            source="vendor-apis §7.2, §7.4: causal only; within 5 % of the CK path (other-systems D1)",
            **common,
        ),
        *per_dtype(
            *HALVES,
            fp8=(fp8,),
            same=False,
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=(*sinks, Feature.KV_SCALES),
            source="vendor-apis §7.2 (k_descale, v_descale), §7 (fp8 kind by chip)",
            **common,
        ),
        *per_dtype(
            *HALVES,
            providers=_AITER_MAIN,
            head_dims=HeadDims(pairs=square(512)),
            features=sinks,
            source="sglang#38757, ROCm/aiter#5649 (D 512 on main)",
            **common,
        ),
    )


def _vectorised(architectures: tuple[str, ...]) -> tuple[CapabilityRow, ...]:
    """On the 5-D cache: the hand-written decode kernel, and main's prefill."""
    chip: dict[str, Any] = {
        "architectures": architectures,
        "layouts": (_VECTORISED,),
        "graph": 1,
        "host_lengths": 1,
    }
    return (
        *per_dtype(
            *HALVES,
            phases=(DECODE,),
            providers=_AITER,
            head_dims=HeadDims(pairs=square(128)),
            group_sizes=tuple(range(1, 17)),
            pages=PageSizes((16,)),
            form=block_table(),
            method="pa_fwd_asm",
            source="vendor-apis §7.1; asm_pa.cu (scale built in, groups to 16), pa_asm.csv (pages of 16)",
            **chip,
        ),
        *per_dtype(
            *HALVES,
            phases=(PREFILL, VERIFY, DRAFT),
            providers=_AITER_MAIN,
            head_dims=HeadDims(pairs=square(128)),
            pages=PageSizes((16,)),
            form=FormSpec("page_csr", index_slack=128),
            features=(*_CALLED, Feature.LSE, Feature.RAGGED_VERIFY),
            method="mha_batch_prefill, 5-D pages",
            source="vendor-apis §7.2; mha_batch_prefill_kernels.cu on main",
            **chip,
        ),
    )


def _aiter_dense(architectures: tuple[str, ...], fp8: str) -> tuple[CapabilityRow, ...]:
    """MHA on one chip, whose fp8 kind the other can't read."""
    chip: dict[str, Any] = {"architectures": architectures, "layouts": (NHD,), "graph": 1}
    return (
        *_paged_decode(chip, fp8),
        *_batch_prefill(chip, fp8),
        *per_dtype(
            *HALVES,
            phases=(PREFILL,),
            providers=_AITER,
            head_dims=HeadDims(pairs=square(64)),
            pages=ANY_PAGE,
            form=_TOKENS,
            features=(*_CALLED, Feature.LSE),
            host_lengths=2,
            method="flash_attn_varlen on gathered keys",
            source="vendor-apis §7.4 (vLLM's extend gathers too)",
            **{**chip, "graph": 0},
        ),
        *_unified(chip, fp8),
        *_vectorised(architectures),
    )


def _aiter_mla(architectures: tuple[str, ...], fp8: str) -> tuple[CapabilityRow, ...]:
    """MLA is token-granular: a page in its table gave 0.005 for 0.975 on gsm8k (sglang#25556)."""
    common: dict[str, Any] = {
        "kinds": (ModelKind.MLA,),
        "architectures": architectures,
        "pages": ANY_PAGE,
        "form": _TOKENS,
        "layouts": (NHD,),
    }
    decode: dict[str, Any] = {
        **common,
        "head_dims": HeadDims(pairs=(LATENT,)),
        "host_lengths": 1,
        "graph": 1,
        "method": "mla_decode_fwd",
    }
    scaled = (Feature.CUSTOM_SCALE, Feature.KV_SCALES)
    few = "engines take AITER for 16 and 128 heads, Triton for this count"
    return (
        *per_dtype(
            "bfloat16",
            phases=(DECODE, VERIFY, DRAFT),
            providers=_AITER,
            q_heads=(16, 128),
            features=(Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
            source="vendor-apis §7.3; sglang-facts §4.1 (aiter for 16 and 128 heads)",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            phases=(DECODE, VERIFY, DRAFT),
            providers=_AITER,
            q_heads=(8,),
            features=(Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
            degraded=f"{few}; padded to 16",
            source="vendor-apis §7.3; padded 4 and 12: left out",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            phases=(DECODE, VERIFY),
            providers=_AITER_MAIN,
            q_heads=(32, 64),
            features=(Feature.CUSTOM_SCALE,),
            degraded=few,
            source="mla_asm.csv on main: plain kernels of 32 and 64 heads",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            fp8=(fp8,),
            same=False,
            phases=(DECODE,),
            providers=_AITER,
            q_heads=(16, 128),
            features=scaled,
            source="vendor-apis §7.3; asm_mla.cu: fp8 queries, at most 4 tokens a request, so no drafts",
            **decode,
        ),
        *per_dtype(
            "bfloat16",
            phases=(PREFILL,),
            providers=_AITER,
            head_dims=HeadDims(pairs=(LATENT, MATERIALISED)),
            q_heads=(8, 16, 128),
            features=(Feature.CUSTOM_SCALE,),
            host_lengths=1,
            graph=1,
            method="mla_prefill_fwd, materialised",
            source="vendor-apis §7.3; asm_mla.cu (bf16, 16 and 128 heads)",
            **common,
        ),
        *per_dtype(
            "bfloat16",
            fp8=(fp8,),
            phases=(PREFILL,),
            providers=_AITER,
            head_dims=HeadDims(pairs=(MATERIALISED,)),
            features=(Feature.LSE, *scaled),
            host_lengths=2,
            method="flash_attn_varlen, materialised",
            source="vendor-apis §7.3, §7.4; latents are dequantised before they are expanded",
            **common,
        ),
    )


ROWS = (
    *_aiter_dense(arch.GFX942, E4M3_FNUZ),
    *_aiter_dense(arch.GFX950, E4M3),
    *_aiter_mla(arch.GFX942, E4M3_FNUZ),
    *_aiter_mla(arch.GFX950, E4M3),
)
