"""Records of sparse attention: `dsa`, `dsv4`, `qsa`, `minimax_sparse`. An indexer picks, the kernel reads.

Rows say what the attention kernel reads; who runs the indexer is declared by INDEXER. Packed fp8 rows are a
layout of their own: latent, scales and rope of a token in one row of so many bytes.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    E4M3,
    FLASHINFER_07,
    HALVES,
    HND,
    LATENT,
    NHD,
    PREFILL,
    TRITON,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.catalog.cuda_mla import FLASHMLA_PROVIDERS
from anyattn.core.capabilities import (
    BackendRecord,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Provider,
)

__all__ = ["RECORDS"]

PACKED_656, PACKED_584 = "DSA_PACKED_656", "DSV4_PACKED_584"

_SPARSE = (ModelKind.SPARSE,)
_SELECTED = (Feature.TOPK_INDICES, Feature.INDEXER, Feature.CUSTOM_SCALE)
_EACH_TOOLKIT = ((arch.SM120, ">=12.8"), (arch.SM121, ">=12.9"))

# --- dsa: DeepSeek V3.2 ----------------------------------------------------------------------------

_FLASHMLA_SPARSE: dict[str, Any] = {
    "kinds": _SPARSE,
    "providers": FLASHMLA_PROVIDERS,
    "head_dims": HeadDims(pairs=(LATENT,)),
    "host_lengths": 0,
    "source": "vendor-apis §5; sglang-facts §3.1, §4.3, §5.8",
}
_HEADS = ((arch.SM90, ()), (arch.SM100_103, (64, 128)))
"""SM100 takes 64 or 128 query heads; adapters pad to them."""

_DSA_ROWS = tuple(
    row
    for chips, heads in _HEADS
    for row in (
        *per_dtype(
            "bfloat16",
            fp8=(E4M3,),
            same=False,
            phases=(DECODE, VERIFY),
            architectures=chips,
            q_heads=heads,
            pages=PageSizes((64,)),
            form=block_table(64),
            layouts=(PACKED_656,),
            features=(*_SELECTED, Feature.LSE),
            graph=1,
            method="FlashMLA sparse decode, packed fp8",
            **_FLASHMLA_SPARSE,
        ),
        *per_dtype(
            "bfloat16",
            phases=(PREFILL,),
            architectures=chips,
            q_heads=heads,
            pages=ANY_PAGE,
            form=FormSpec("token_csr", kernel_page=1),
            features=(*_SELECTED, Feature.LSE, Feature.SINKS),
            method="FlashMLA sparse prefill",
            **_FLASHMLA_SPARSE,
        ),
    )
)

_DSA_OTHER_ROWS = (
    *per_dtype(
        *HALVES,
        kinds=_SPARSE,
        phases=(DECODE,),
        architectures=arch.SM90,
        providers=(Provider("sglang-kernel", ">=0.4", ("sgl_kernel",)),),
        runtime=">=12.3",
        head_dims=HeadDims(pairs=(LATENT,)),
        pages=ANY_PAGE,
        form=block_table(1),
        features=_SELECTED,
        host_lengths=0,
        graph=1,
        method="FA3 over a table of tokens",
        source="sglang-facts §4.3, §5.8 (page_table_1)",
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        kinds=_SPARSE,
        phases=(DECODE, VERIFY),
        architectures=arch.SM100_103,
        providers=(FLASHINFER_07,),
        runtime=">=12.8",
        head_dims=HeadDims(pairs=(LATENT,)),
        pages=PageSizes((32, 64)),
        form=block_table(width_multiple=4),
        layouts=(NHD, HND),
        features=_SELECTED,
        host_lengths=1,
        graph=1,
        method="trtllm-gen sparse MLA",
        source="vendor-apis §2.9 (sparse_mla_top_k), sglang-facts §4.3",
    ),
    *(
        row
        for chips, runtime in _EACH_TOOLKIT
        for row in per_dtype(
            "bfloat16",
            fp8=(E4M3,),
            same=False,
            kinds=_SPARSE,
            phases=(DECODE,),
            architectures=chips,
            providers=(FLASHINFER_07,),
            runtime=runtime,
            head_dims=HeadDims(pairs=(LATENT,)),
            pages=PageSizes((64,)),
            form=block_table(64, width_multiple=2),
            layouts=(PACKED_656,),
            features=_SELECTED,
            host_lengths=1,
            graph=1,
            method="FlashInfer sparse MLA, packed fp8",
            source="vendor-apis §2.9 (cc 12: packed rows of 656 bytes)",
        )
    ),
)

# --- dsv4, qsa, minimax_sparse ---------------------------------------------------------------------

_DSV4_ROWS = tuple(
    row
    for chips, heads in _HEADS
    for row in per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        kinds=_SPARSE,
        phases=(PREFILL, DECODE, VERIFY),
        architectures=chips,
        providers=FLASHMLA_PROVIDERS,
        head_dims=HeadDims(pairs=square(512)),
        q_heads=heads,
        pages=PageSizes((256,)),
        form=block_table(256),
        layouts=(PACKED_584,),
        features=(*_SELECTED, Feature.WINDOW, Feature.SINKS, Feature.LSE),
        host_lengths=0,
        graph=1,
        method="FlashMLA sparse, packed V4 rows",
        source="vendor-apis §5 (584-byte rows), sglang-facts §3.1, §5.8 (window 128, pages of 256)",
    )
)

_QSA_ROWS = per_dtype(
    "bfloat16",
    kinds=_SPARSE,
    phases=(PREFILL, DECODE),
    architectures=(*arch.SM90, *arch.SM100_103),
    requires=(TRITON,),
    head_dims=HeadDims(pairs=square(256)),
    pages=PageSizes((64,)),
    form=block_table(64),
    features=_SELECTED,
    host_lengths=1,
    graph=1,
    method="own kernels over selected blocks",
    source="sglang-facts §3.1 (pages of 64, indexer on SM90, SM100); D 256, bf16: sglang#36497, vllm#53896",
)

_MSA: dict[str, Any] = {
    "kinds": _SPARSE,
    "phases": (PREFILL, DECODE),
    "providers": (FLASHINFER_07,),
    "head_dims": HeadDims(pairs=square(128)),
    "group_sizes": tuple(range(1, 17)),
    "pages": PageSizes((128,)),
    "form": block_table(128),
    "layouts": (HND,),
    "host_lengths": 1,
    "graph": 1,
    "source": "flashinfer/msa_ops of 0.7.2: top 16 blocks of 128; SM90 and older: no kernel named",
}
_MSA_ROWS = (
    *per_dtype(
        *HALVES,
        architectures=("cuda:sm100",),
        runtime=">=12.8",
        features=(Feature.TOPK_INDICES,),
        method="FlashInfer MSA, indexer apart",
        **_MSA,
    ),
    *per_dtype(
        *HALVES,
        architectures=("cuda:sm103",),
        runtime=">=12.9",
        features=(Feature.TOPK_INDICES,),
        method="FlashInfer MSA, indexer apart",
        **_MSA,
    ),
    *(
        row
        for chips, runtime in _EACH_TOOLKIT
        for row in per_dtype(
            *HALVES,
            architectures=chips,
            runtime=runtime,
            features=(Feature.TOPK_INDICES, Feature.INDEXER),
            method="FlashInfer MSA with its indexer",
            **_MSA,
        )
    ),
)

RECORDS = (
    BackendRecord(
        name="dsa",
        summary="DeepSeek sparse attention: MLA over the tokens that an indexer picked",
        rows=(*_DSA_ROWS, *_DSA_OTHER_ROWS),
        deprecated_aliases=("nsa",),
    ),
    BackendRecord(
        name="qsa",
        summary="Qwen sparse attention: grouped heads over blocks that an indexer picked",
        rows=_QSA_ROWS,
    ),
    BackendRecord(
        name="dsv4",
        summary="DeepSeek V4: window, compressed and sparse latent rows in one call",
        rows=_DSV4_ROWS,
    ),
    BackendRecord(
        name="minimax_sparse",
        summary="MiniMax block-sparse attention: the top 16 blocks of 128 keys",
        rows=_MSA_ROWS,
    ),
)
