"""Rows of `trtllm_mha`, `trtllm_mla` and `cutedsl_mla`: block-table kernels that need no plan.

trtllm-gen binaries exist for SM100 and SM103 alone. SM90, SM120 and SM121 get XQA, another kernel; SM110
gets neither. FlashInfer fetches the trtllm-gen binaries at run time (vendor-apis §2.2).
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    DECODE,
    DRAFT,
    E4M3,
    FLASHINFER_07,
    HALVES,
    HND,
    LATENT,
    LATENTS,
    MATERIALISED,
    NHD,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import CapabilityRow, Feature, HeadDims, ModelKind, PageSizes, Provider

__all__ = ["CUTEDSL_MLA_ROWS", "TRTLLM_MHA_ROWS", "TRTLLM_MLA_ROWS"]

_FEATURES = (Feature.WINDOW, Feature.SINKS, Feature.CUSTOM_SCALE, Feature.KV_SCALES)

# --- trtllm_mha ------------------------------------------------------------------------------------

_GEN: dict[str, Any] = {
    "architectures": arch.SM100_103,
    "providers": (FLASHINFER_07,),
    "runtime": ">=12.8",
    "fp8": (E4M3,),
    # 128 and more run through dynamic-page kernels whose exact set is unverified, and flashinfer#4347 read
    # wrong pages there.
    "pages": PageSizes((16, 32, 64)),
    "form": block_table(),
    "layouts": (HND, NHD),
    "host_lengths": 1,
    "graph": 1,
}

_TRTLLM_GEN = (
    *per_dtype(
        *HALVES,
        phases=(DECODE, VERIFY),
        head_dims=HeadDims(pairs=square(64, 80, 128, 256)),
        features=(*_FEATURES, Feature.LSE, Feature.RAGGED_VERIFY),
        method="trtllm-gen decode",
        source="vendor-apis §2.8, §1.4; no cap; chain drafts only (sglang-facts §5.4)",
        **_GEN,
    ),
    *per_dtype(
        *HALVES,
        phases=(DECODE,),
        head_dims=HeadDims(pairs=square(512)),
        features=(*_FEATURES, Feature.LSE),
        method="trtllm-gen decode",
        source="vendor-apis §2.8; D 512 lacked kernels for 16 query tokens (flashinfer#3511), so no verify",
        **_GEN,
    ),
    *per_dtype(
        *HALVES,
        phases=(PREFILL, DRAFT),
        head_dims=HeadDims(pairs=square(64, 128, 256)),
        features=(*_FEATURES, Feature.LSE),
        method="trtllm-gen context",
        source="vendor-apis §2.8; D 80 and unequal sizes: no fact for the context kernels",
        **_GEN,
    ),
    *per_dtype(
        *HALVES,
        phases=(PREFILL,),
        head_dims=HeadDims(pairs=square(512)),
        features=(*_FEATURES, Feature.LSE),
        method="trtllm-gen context",
        source="flashinfer#2959 (prefill and decode at D 512)",
        **_GEN,
    ),
)


def _xqa(
    architectures: tuple[str, ...], runtime: str, phases: tuple[Any, ...], largest: int
) -> tuple[CapabilityRow, ...]:
    """XQA: one kernel for decode and chain verification; no LSE, no cap."""
    ragged = (Feature.RAGGED_VERIFY,) if phases == (VERIFY,) else ()
    return per_dtype(
        *HALVES,
        fp8=(E4M3,),
        phases=phases,
        architectures=architectures,
        providers=(FLASHINFER_07,),
        runtime=runtime,
        head_dims=HeadDims(minimum=16, maximum=largest, multiple=16),
        pages=PageSizes((16, 32, 64, 128)),
        form=block_table(),
        layouts=(NHD, HND),
        features=(*_FEATURES, *ragged),
        host_lengths=1,
        graph=1,
        method="xqa",
        source="vendor-apis §2.8, §1.4; flashinfer/xqa.py of 0.7.2; sinks on SM12x: flashinfer#4070; "
        "prefill there is fmha_v2 (sglang-facts §3.1), whose call has no recorded fact",
    )


TRTLLM_MHA_ROWS = (
    *_TRTLLM_GEN,
    *_xqa(arch.SM90, "", (DECODE,), 256),
    *_xqa(arch.SM90, "", (VERIFY,), 256),
    *_xqa(arch.SM120, ">=12.8", (DECODE,), 512),
    *_xqa(arch.SM120, ">=12.8", (VERIFY,), 256),
    *_xqa(arch.SM121, ">=12.9", (DECODE,), 512),
    *_xqa(arch.SM121, ">=12.9", (VERIFY,), 256),
)

# --- MLA on SM100 and SM103 ------------------------------------------------------------------------

_MLA: dict[str, Any] = {
    "kinds": (ModelKind.MLA,),
    "architectures": arch.SM100_103,
    "fp8": (E4M3,),
    "runtime": ">=12.8",
    "pages": PageSizes((32, 64)),
    # A row of the table covers whole blocks of 128 tokens: 128 / 32 entries.
    "form": block_table(width_multiple=4),
    "layouts": (NHD, HND),
    "host_lengths": 1,
    "graph": 1,
}

TRTLLM_MLA_ROWS = (
    *per_dtype(
        "bfloat16",
        phases=(DECODE, VERIFY),
        providers=(FLASHINFER_07,),
        head_dims=LATENTS,
        q_heads=(*range(1, 65), 128),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.KV_SCALES, Feature.RAGGED_VERIFY),
        method="trtllm-gen MLA",
        source="vendor-apis §2.9; trtllm_gen_backend.py of 0.7.2: not 65 to 127 heads; never SM12x",
        **_MLA,
    ),
    *per_dtype(
        "bfloat16",
        phases=(PREFILL, DRAFT),
        providers=(FLASHINFER_07,),
        head_dims=HeadDims(pairs=(MATERIALISED, LATENT)),
        q_heads=(*range(1, 65), 128),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.KV_SCALES),
        method="trtllm-gen ragged, materialised",
        source="sglang-facts §3.1, §5.7; draft-extend: sglang-facts §3.2",
        **_MLA,
    ),
)

_TOKENSPEED = Provider("tokenspeed-mla", ">=2.0.3", ("tokenspeed_mla",))
_CUTEDSL = Provider("flashinfer-python", ">=0.6.15", ("flashinfer",))
_DSL = (Provider("nvidia-cutlass-dsl", ">=4.6.2", ("cutlass",)),)

CUTEDSL_MLA_ROWS = (
    *per_dtype(
        *HALVES,
        phases=(DECODE, VERIFY),
        providers=(_TOKENSPEED,),
        requires=(Provider("nvidia-cutlass-dsl", ">=4.8", ("cutlass",)),),
        head_dims=HeadDims(pairs=(LATENT,)),
        q_heads=tuple(range(1, 129)),
        features=(Feature.WINDOW, Feature.LSE, Feature.CUSTOM_SCALE, Feature.KV_SCALES),
        method="CuTe decode (tokenspeed-mla)",
        source="vendor-apis §6, §1.7; decode only: prefill is another backend's (sglang-facts §3.1)",
        **_MLA,
    ),
    *per_dtype(
        "bfloat16",
        phases=(DECODE, VERIFY),
        providers=(_CUTEDSL,),
        requires=_DSL,
        head_dims=HeadDims(pairs=(LATENT,)),
        q_heads=tuple(range(1, 129)),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.KV_SCALES),
        method="CuTe decode (FlashInfer)",
        source="vendor-apis §2.9 (natural-log LSE), sglang-facts §3.1 (0.6.15 for 5 tokens and more)",
        **_MLA,
    ),
)
