"""Rows of `flashinfer`: FlashInfer's paged and ragged wrappers for dense models, its MLA wrapper.

FlashInfer chooses an inner kernel by itself (`auto`), which changed between releases and, for MLA on
SM100, changes from step to step. Each row names one inner kernel instead; the adapter passes that name.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    E4M3,
    E5M2,
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
from anyattn.core.capabilities import Feature, FormSpec, HeadDims, ModelKind, PageSizes, Provider

__all__ = ["DENSE_ROWS", "MLA_ROWS"]

_FLASHINFER = Provider("flashinfer-python", ">=0.6", ("flashinfer",))
_LARGE_HEADS = Provider("flashinfer-python", ">=0.6.16", ("flashinfer",))
_LARGE_HEADS_FP8 = FLASHINFER_07

_EACH_TOOLKIT: tuple[tuple[tuple[str, ...], str], ...] = (
    # CUDA that can compile for the chip (vendor-apis §2.2; SM110: flashinfer/utils.py of 0.7.2).
    ((*arch.SM80_86_89, *arch.SM90), ""),
    ((*arch.SM100_103, *arch.SM120), ">=12.8"),
    (arch.SM121, ">=12.9"),
    (("cuda:sm110",), ">=13.0"),
)

_PLANNED: dict[str, Any] = {
    # `plan` reads offsets on the host; under a graph the batch size is fixed.
    "host_lengths": 2,
    "graph": 1,
    "pages": ANY_PAGE,
    "form": FormSpec("page_csr"),
    "layouts": (NHD, HND),
}
_FA2_FEATURES = (
    Feature.WINDOW,
    Feature.LOGIT_CAP,
    Feature.LSE,
    Feature.CUSTOM_SCALE,
    Feature.EXPLICIT_MASK,
    Feature.TREE_VERIFY,
    Feature.RAGGED_VERIFY,
)
_PREFILL_FA3 = per_dtype(
    *HALVES,
    phases=(PREFILL, VERIFY),
    architectures=arch.SM90,
    providers=(_FLASHINFER,),
    runtime=">=12.3",
    head_dims=HeadDims(pairs=(*square(64, 128, 256), MATERIALISED)),
    features=(
        Feature.WINDOW,
        Feature.LOGIT_CAP,
        Feature.LSE,
        Feature.CUSTOM_SCALE,
        Feature.RAGGED_VERIFY,
    ),
    determinism=1,
    method="fa3, ragged + paged",
    source="vendor-apis §2.3 (auto rule), §2.5, §2.6",
    **_PLANNED,
)


def _fa2(architectures: tuple[str, ...], runtime: str) -> tuple[Any, ...]:
    """The fa2 template, which every chip since SM80 runs: the general kernel and its special forms."""
    common = {"architectures": architectures, "runtime": runtime, **_PLANNED}
    everything = (PREFILL, DECODE, VERIFY, DRAFT)
    return (
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_FLASHINFER,),
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=_FA2_FEATURES,
            determinism=2,
            method="fa2, tensor cores",
            source="vendor-apis §2.3, §2.4, §2.5; fixed split sizes for batch invariance: sglang-facts §5.12",
            **common,
        ),
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_FLASHINFER,),
            fp8=(E4M3, E5M2),
            same=False,
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=(*_FA2_FEATURES, Feature.KV_SCALES),
            determinism=1,
            method="fa2, tensor cores, fp8 KV",
            source="vendor-apis §2.3 (fp8 KV under 16-bit Q is fa2's), vllm#24577",
            **common,
        ),
        # A window bounds the left side only, so none is declared where later keys are visible.
        *per_dtype(
            *HALVES,
            phases=(PREFILL, DECODE),
            providers=(_FLASHINFER,),
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            features=(
                Feature.BIDIRECTIONAL,
                Feature.ENCODER_ONLY,
                Feature.CROSS,
                Feature.LOGIT_CAP,
                Feature.LSE,
                Feature.CUSTOM_SCALE,
            ),
            determinism=1,
            method="fa2, not causal",
            source="vendor-apis §2.5, §2.6; window and cross exclude each other: sglang-facts §3.1",
            **common,
        ),
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_LARGE_HEADS,),
            head_dims=HeadDims(pairs=square(512)),
            features=_FA2_FEATURES,
            determinism=1,
            method="fa2, large heads",
            source="vendor-apis §2.3; flashinfer#3739 (SM80 and later), flashinfer#3576 (SM120, SM121)",
            **common,
        ),
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_LARGE_HEADS_FP8,),
            fp8=(E4M3,),
            same=False,
            head_dims=HeadDims(pairs=square(512)),
            features=(*_FA2_FEATURES, Feature.KV_SCALES),
            determinism=1,
            method="fa2, large heads, fp8 KV",
            source="flashinfer/jit/attention/modules.py of 0.7.2; flashinfer#5044",
            **common,
        ),
    )


def _sinks(architectures: tuple[str, ...], runtime: str) -> tuple[Any, ...]:
    """`run(sinks=)` of the plain wrappers is accepted and dropped by fa2 and fa3 (vllm#52148): only the
    wrapper built for sinks applies them. It has no cap, no mask and no fp8 form."""
    return per_dtype(
        *HALVES,
        phases=(PREFILL, DECODE, VERIFY, DRAFT),
        architectures=architectures,
        providers=(FLASHINFER_07,),
        runtime=runtime,
        head_dims=HeadDims(pairs=square(64, 128)),
        features=(Feature.WINDOW, Feature.SINKS, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
        determinism=1,
        method="attention-sink wrapper",
        source="flashinfer/attention/_core.py of 0.7.2; SM120, SM121: flashinfer#4070, vllm#52148",
        **_PLANNED,
    )


DENSE_ROWS = (
    *_PREFILL_FA3,
    *(row for chips, runtime in _EACH_TOOLKIT for row in _fa2(chips, runtime)),
    *(row for chips, runtime in _EACH_TOOLKIT if chips != ("cuda:sm110",) for row in _sinks(chips, runtime)),
)

# --- MLA -------------------------------------------------------------------------------------------

_MLA: dict[str, Any] = {
    "kinds": (ModelKind.MLA,),
    "phases": (PREFILL, DECODE, VERIFY, DRAFT),
    "features": (Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
    "determinism": 1,
    "pages": ANY_PAGE,
    "form": FormSpec("page_csr"),
    # A latent is one head, so NHD and HND are the same bytes.
    "layouts": (NHD, HND),
    "host_lengths": 2,
    "graph": 1,
}

MLA_ROWS = (
    *per_dtype(
        *HALVES,
        architectures=arch.SM90,
        providers=(_FLASHINFER,),
        runtime=">=12.3",
        head_dims=LATENTS,
        method="fa3 MLA, ragged prefill",
        source="vendor-apis §2.3, §2.9; flashinfer/mla/_batch_mla/_backends/_fa_common.py of 0.7.2",
        **_MLA,
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
        **{**_MLA, "features": (*_MLA["features"], Feature.KV_SCALES)},
    ),
    *(
        row
        for chips, runtime in _EACH_TOOLKIT
        for row in per_dtype(
            *HALVES,
            architectures=chips,
            providers=(_FLASHINFER,),
            runtime=runtime,
            head_dims=HeadDims(pairs=(LATENT,)),
            method="fa2 MLA, ragged prefill",
            source="_fa_common.py of 0.7.2: from SM80 on; 92,704 bytes of shared memory fit all",
            **_MLA,
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
