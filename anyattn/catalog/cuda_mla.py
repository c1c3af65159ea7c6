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
    CapabilityRow,
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
    "determinism": 1,
    "pages": ANY_PAGE,
    "form": FormSpec("page_csr"),
    "layouts": (NHD, HND),
    "host_lengths": 2,
    "graph": 1,
}
_WRAPPED = (Feature.LSE, Feature.CUSTOM_SCALE, Feature.Q_ROPE)
_WHOLE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Head counts whose tokens fill tiles of 64 or 128 rows. Others lose a key where a causal step's tile cuts a
token (`_validate_fa_causal_tile_bound`, _fa_common.py of 0.7.2); one token a request isn't causal."""


def _wrapper(
    latents: HeadDims, *dtypes: str, features: tuple[Feature, ...] = (), **fields: Any
) -> tuple[CapabilityRow, ...]:
    """Decode for any head count, the causal phases for whole tokens; prefill may be materialised."""
    both = HeadDims(pairs=(*latents.pairs, MATERIALISED))
    phases: tuple[dict[str, Any], ...] = (
        {"phases": (PREFILL,), "head_dims": both, "q_heads": _WHOLE_TOKENS},
        {"phases": (DECODE,), "head_dims": latents},
        {"phases": (VERIFY, DRAFT), "head_dims": latents, "q_heads": _WHOLE_TOKENS},
    )
    return tuple(
        row
        for phase in phases
        for row in per_dtype(
            *dtypes,
            features=(*_WRAPPED, *features, *((Feature.RAGGED_VERIFY,) if VERIFY in phase["phases"] else ())),
            **phase,
            **fields,
            **_WRAPPER,
        )
    )


FLASHINFER_MLA_ROWS = (
    *_wrapper(
        LATENTS,
        *HALVES,
        architectures=arch.SM90,
        providers=(FLASHINFER,),
        runtime=">=12.3",
        method="fa3 MLA, ragged prefill",
        source="vendor-apis §2.3, §2.9; flashinfer/mla/_batch_mla/_backends/_fa_common.py of 0.7.2",
    ),
    *_wrapper(
        HeadDims(pairs=(LATENT,)),
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(FLASHINFER_07,),
        runtime=">=12.3",
        features=(Feature.KV_SCALES,),
        method="fa3 MLA, fp8 KV",
        source="_fa_common.py of 0.7.2: fp8 KV on SM90 with bf16 Q alone, one scale per tensor",
    ),
    *(
        row
        for chips, runtime in EACH_TOOLKIT
        for row in _wrapper(
            HeadDims(pairs=(LATENT,)),
            *HALVES,
            architectures=chips,
            providers=(FLASHINFER,),
            runtime=runtime,
            method="fa2 MLA, ragged prefill",
            source="_fa_common.py of 0.7.2: from SM80 on; 92,704 bytes of shared memory fit all",
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
            features=(Feature.CUSTOM_SCALE, Feature.Q_ROPE, Feature.KV_SCALES),
            host_lengths=1,
            graph=1,
            method="xqa MLA",
            source="vendor-apis §2.9; flashinfer/mla/_core.py of 0.7.2: 128 heads, one query token, no LSE; "
            "fp8 KV takes fp8 queries",
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
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.Q_ROPE),
        method="dense decode",
        source="vendor-apis §5 (sgl-flash-mla: use_legacy=True); uniform query lengths; prefill is another's",
        **_FLASHMLA,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        providers=(FLASHMLA_PROVIDERS[0],),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.Q_ROPE, Feature.KV_SCALES),
        method="dense decode, fp8 KV and queries",
        source="sgl-flash-mla 1.0.0, dense_fp8_python_api.cpp: q and KV both e4m3; sglang-kernel's op is "
        "switched off (sgl_kernel/flash_mla.py raises), tokenspeed's build takes no descales",
        **_FLASHMLA,
    ),
)

# --- trtllm_mla, cutedsl_mla: SM100 and SM103 --------------------------------------------------------

_MLA: dict[str, Any] = {
    "kinds": (ModelKind.MLA,),
    "architectures": arch.SM100_103,
    "runtime": ">=12.8",
    "pages": PageSizes((32, 64)),
    # A row of the table covers whole blocks of 128 tokens: 128 / 32 entries.
    "form": block_table(width_multiple=4),
    "layouts": (NHD, HND),
}
_TABLES: dict[str, Any] = {"host_lengths": 1, "graph": 1, **_MLA}
_SCALED = (Feature.CUSTOM_SCALE, Feature.Q_ROPE, Feature.KV_SCALES)
_TRTLLM: dict[str, Any] = {
    "fp8": (E4M3,),
    "providers": (FLASHINFER_07,),
    "q_heads": (*range(1, 65), 128),
}

TRTLLM_MLA_ROWS = (
    *per_dtype(
        "bfloat16",
        phases=(DECODE, VERIFY),
        head_dims=LATENTS,
        features=(Feature.LSE, *_SCALED),
        method="trtllm-gen MLA",
        source="vendor-apis §2.9; flashinfer/mla/_core.py of 0.7.2: not 65 to 127 heads; never SM12x; "
        "fp8 KV takes fp8 queries",
        **_TRTLLM,
        **_TABLES,
    ),
    *per_dtype(
        "bfloat16",
        phases=(VERIFY, DRAFT),
        head_dims=LATENTS,
        features=(Feature.RAGGED_VERIFY, *_SCALED),
        method="trtllm-gen MLA, ragged queries",
        source="flashinfer/mla/_core.py of 0.7.2: no LSE with cum_seq_lens_q; sglang-facts §3.2",
        **_TRTLLM,
        **_TABLES,
    ),
    *per_dtype(
        "bfloat16",
        phases=(PREFILL,),
        head_dims=HeadDims(pairs=(MATERIALISED,)),
        features=(Feature.LSE, *_SCALED),
        host_lengths=2,
        method="trtllm-gen ragged, materialised",
        source="trtllm_ragged_attention_deepseek of 0.7.2: base-2 LSE, rows without keys by host lengths; "
        "sglang-facts §3.1, §5.7",
        **_TRTLLM,
        **_MLA,
    ),
)

_TOKENSPEED = Provider("tokenspeed-mla", ">=2.0.3", ("tokenspeed_mla",))
_CUTEDSL = Provider("flashinfer-python", ">=0.6.15", ("flashinfer",))
_DSL = (Provider("nvidia-cutlass-dsl", ">=4.6.2", ("cutlass",)),)
_CUTE: dict[str, Any] = {
    "phases": (DECODE, VERIFY),
    "head_dims": HeadDims(pairs=(LATENT,)),
    "q_heads": tuple(range(1, 129)),
    **_TABLES,
}
_TOKENSPEED_ROW: dict[str, Any] = {
    "providers": (_TOKENSPEED,),
    "requires": (Provider("nvidia-cutlass-dsl", ">=4.8", ("cutlass",)),),
    "method": "CuTe decode (tokenspeed-mla)",
    "source": "vendor-apis §6, §1.7; decode only: prefill is another backend's (sglang-facts §3.1); fp8 KV "
    "takes fp8 queries and gives bf16 (mla_decode.py of 2.0.4)",
    **_CUTE,
}

CUTEDSL_MLA_ROWS = (
    *per_dtype(
        *HALVES,
        features=(Feature.WINDOW, Feature.LSE, Feature.CUSTOM_SCALE, Feature.Q_ROPE),
        **_TOKENSPEED_ROW,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        features=(Feature.WINDOW, Feature.LSE, *_SCALED),
        **_TOKENSPEED_ROW,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        providers=(_CUTEDSL,),
        requires=_DSL,
        features=(Feature.LSE, *_SCALED),
        method="CuTe decode (FlashInfer)",
        source="vendor-apis §2.9 (natural-log LSE), sglang-facts §3.1 (0.6.15 for 5 tokens and more)",
        **_CUTE,
    ),
)
