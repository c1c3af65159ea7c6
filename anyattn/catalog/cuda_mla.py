"""Rows of the MLA kernels on CUDA: `flashinfer`'s wrapper, `flashmla`, `trtllm_mla`, `cutedsl_mla`.

A latent is one head, so NHD and HND are the same bytes and rows list both.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
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
)
from anyattn.catalog.cuda_flashinfer import EACH_TOOLKIT, FLASHINFER
from anyattn.core.capabilities import (
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Provider,
)

__all__ = [
    "CUTEDSL_MLA_ROWS",
    "FLASHINFER_MLA_ROWS",
    "FLASHMLA_PROVIDERS",
    "FLASHMLA_ROWS",
    "TRTLLM_MLA_ROWS",
]

# --- flashinfer: one inner kernel a row --------------------------------------------------------------

_WRAPPER: dict[str, Any] = {
    "kinds": (ModelKind.MLA,),
    "phases": (PREFILL, DECODE, VERIFY, DRAFT),
    "features": (Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
    "determinism": 1,
    "pages": ANY_PAGE,
    "form": FormSpec("page_csr"),
    "layouts": (NHD, HND),
    "host_lengths": 2,
    "graph": 1,
}

FLASHINFER_MLA_ROWS = (
    *per_dtype(
        *HALVES,
        architectures=arch.SM90,
        providers=(FLASHINFER,),
        runtime=">=12.3",
        head_dims=LATENTS,
        method="fa3 MLA, ragged prefill",
        source="vendor-apis §2.3, §2.9; flashinfer/mla/_batch_mla/_backends/_fa_common.py of 0.7.2",
        **_WRAPPER,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(FLASHINFER_07,),
        runtime=">=12.3",
        head_dims=HeadDims(pairs=(LATENT,)),
        method="fa3 MLA, fp8 KV",
        source="_fa_common.py of 0.7.2: fp8 KV on SM90 with bf16 Q alone, one scale per tensor",
        **{**_WRAPPER, "features": (*_WRAPPER["features"], Feature.KV_SCALES)},
    ),
    *(
        row
        for chips, runtime in EACH_TOOLKIT
        for row in per_dtype(
            *HALVES,
            architectures=chips,
            providers=(FLASHINFER,),
            runtime=runtime,
            head_dims=HeadDims(pairs=(LATENT,)),
            method="fa2 MLA, ragged prefill",
            source="_fa_common.py of 0.7.2: from SM80 on; 92,704 bytes of shared memory fit all",
            **_WRAPPER,
        )
    ),
    *(
        row
        for chips, runtime in ((arch.SM120, ">=12.8"), (arch.SM121, ">=12.9"))
        for row in per_dtype(
            "bfloat16",
            fp8=(E4M3,),
            kinds=(ModelKind.MLA,),
            phases=(DECODE,),
            architectures=chips,
            providers=(FLASHINFER_07,),
            runtime=runtime,
            head_dims=HeadDims(pairs=(LATENT,)),
            q_heads=(128,),
            pages=PageSizes((16, 32, 64, 128)),
            form=block_table(width_multiple=8),
            layouts=(NHD, HND),
            features=(Feature.CUSTOM_SCALE,),
            host_lengths=1,
            graph=1,
            method="xqa MLA",
            source="vendor-apis §2.9; xqa_backend.py of 0.7.2: 128 heads, one query token, no LSE",
        )
    ),
)

# --- flashmla: SM90 ------------------------------------------------------------------------------------

FLASHMLA_PROVIDERS = (
    Provider("sgl-flash-mla", ">=1.0", ("flash_mla",)),
    Provider("tokenspeed-flashmla", ">=1.0", ("flash_mla",)),
)
_SGL_KERNEL = (
    Provider("sglang-kernel", ">=0.4", ("sgl_kernel",)),
    Provider("sgl-kernel", ">=0.3.21", ("sgl_kernel",)),
)

_FLASHMLA: dict[str, Any] = {
    "kinds": (ModelKind.MLA,),
    "phases": (DECODE, VERIFY),
    "architectures": arch.SM90,
    "head_dims": HeadDims(pairs=(LATENT,)),
    "pages": PageSizes((64,)),
    "form": block_table(64),
    "layouts": (NHD, HND),
    "host_lengths": 0,
    "graph": 1,
}

FLASHMLA_ROWS = (
    *per_dtype(
        *HALVES,
        providers=(*FLASHMLA_PROVIDERS, *_SGL_KERNEL),
        features=(Feature.LSE, Feature.CUSTOM_SCALE),
        method="dense decode",
        source="vendor-apis §5 (sgl-flash-mla: use_legacy=True); uniform query lengths; prefill is another's",
        **_FLASHMLA,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        providers=(FLASHMLA_PROVIDERS[0], *_SGL_KERNEL),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.KV_SCALES),
        method="dense decode, fp8 KV",
        source="vendor-apis §5: descales exist in the sgl builds only",
        **_FLASHMLA,
    ),
)

# --- trtllm_mla, cutedsl_mla: SM100 and SM103 --------------------------------------------------------

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
