"""Record of `ascend`: torch-npu's fused infer attention on 910B and 910C, the older operators on 310P."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    DECODE,
    DRAFT,
    HALVES,
    HND,
    LATENT,
    MATERIALISED,
    NHD,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import BackendRecord, Feature, HeadDims, ModelKind, PageSizes, Provider

__all__ = ["RECORDS"]

NZ = "NZ"
"""`[N, Hkv, D / 16, P, 16]`: 310P's operators read it, heads and chunks as one axis (vendor-apis §1.5), and
fused infer attention reads latents so."""
SPLIT = "SPLIT"
"""Latents and rotated keys in tensors of their own: the operator takes no strided cache."""

_TORCH_NPU = (Provider("torch-npu", ">=2.10", ("torch_npu",)),)
_TORCH_NPU_V2 = (Provider("torch-npu", ">=2.13", ("torch_npu",)),)
"""The operator's second version: its schema stands in 2.13.0 and 2.14.0; older ones weren't looked at."""
_PAGE = PageSizes((128,))
_GROUPS = tuple(range(1, 65))

_FIA: dict[str, Any] = {
    # One TND call serves decode, extend and mixed steps; its lengths are host lists, updated before replay.
    "architectures": arch.ASCEND_910,
    "pages": _PAGE,  # 16 gave garbage and 1 was refused (sglang#38196); queries of 2 and more want 128
    "form": block_table(128),
    "layouts": (NHD, HND),
    "group_sizes": _GROUPS,
    "host_lengths": 2,
    "graph": 1,
}
_LATENT = {**_FIA, "layouts": (SPLIT, NZ), "group_sizes": ()}
_ALL = (PREFILL, DECODE, VERIFY, DRAFT)
_FEATURES = (Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY)

_ROWS = (
    *per_dtype(
        *HALVES,
        phases=_ALL,
        providers=_TORCH_NPU,
        head_dims=HeadDims(pairs=square(64, 128, 192)),
        features=(*_FEATURES, Feature.BIDIRECTIONAL, Feature.ENCODER_ONLY),
        determinism=1,
        method="FIA, TND or one token",
        source="vendor-apis §8.2, §8.5; head sizes: vllm-ascend#9632 (on D 256 sglang#28635 disagrees); over "
        "pages K and V have one shape (documents of torch-npu 2.13)",
        **_FIA,
    ),
    *per_dtype(
        "bfloat16",
        phases=_ALL,
        providers=_TORCH_NPU_V2,
        head_dims=HeadDims(pairs=square(64, 128)),
        features=(Feature.SINKS, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
        method="FIA v2 TND, learnable sink",
        source="vendor-apis §8.2: bf16 sinks, TND, Dv up to 128",
        **_FIA,
    ),
    *per_dtype(
        *HALVES,
        phases=_ALL,
        providers=_TORCH_NPU,
        head_dims=HeadDims(pairs=square(64, 128)),
        features=(*_FEATURES, Feature.WINDOW),
        degraded="the band's bound is unproven: W for vllm-ascend, W - 1 for SGLang and the documents",
        method="FIA TND, band mask",
        source="vendor-apis §1.3, §8.2, §16",
        **_FIA,
    ),
    *per_dtype(
        *HALVES,
        kinds=(ModelKind.MLA,),
        phases=(DECODE, VERIFY, DRAFT),
        providers=_TORCH_NPU_V2,
        head_dims=HeadDims(pairs=(LATENT,)),
        q_heads=(1, 2, 4, 8, 16, 32, 64, 128),
        features=(Feature.LSE, Feature.CUSTOM_SCALE),
        method="FIA v2 TND, rope apart",
        source="documents of torch-npu 2.13: head counts, up to 16 query tokens a request, pages of 128, NZ",
        **_LATENT,
    ),
    *per_dtype(
        "bfloat16",
        kinds=(ModelKind.MLA,),
        phases=(PREFILL,),
        providers=_TORCH_NPU_V2,
        head_dims=HeadDims(pairs=(MATERIALISED,)),
        features=(Feature.LSE, Feature.CUSTOM_SCALE),
        method="FIA v2 TND without pages, materialised",
        source="documents of torch-npu 2.13: TND of D 192 and Dv 128 is bf16 and takes no pages",
        **{**_LATENT, "graph": 0},
    ),
    *per_dtype(
        "float16",
        phases=(PREFILL, DECODE),
        architectures=arch.ASCEND_310P,
        providers=_TORCH_NPU,
        head_dims=HeadDims(pairs=square(64, 128)),
        pages=_PAGE,
        form=block_table(128),
        layouts=(NZ,),
        features=(Feature.CUSTOM_SCALE,),
        host_lengths=2,
        graph=0,
        method="flash, paged and splitfuse operators",
        source="vendor-apis §8.3: fp16 and NZ only, P * D up to 128 * 128; other head sizes: no fact",
    ),
)

RECORDS = (
    BackendRecord(
        name="ascend",
        summary="torch-npu: fused infer attention (TND, pages of 128) on 910B and 910C; fp16 NZ on 310P",
        rows=_ROWS,
        targets={
            ModelKind.DENSE: "anyattn.backends.ascend.ascend:Ascend",
            ModelKind.MLA: "anyattn.backends.ascend.ascend_mla:AscendMLA",
        },
    ),
)
