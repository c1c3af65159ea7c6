"""Records of the NVIDIA families. Their rows are in `cuda_*.py`; one name may serve dense models and MLA."""

from __future__ import annotations

from anyattn.catalog import cuda_flash, cuda_flashinfer, cuda_mha, cuda_mla
from anyattn.catalog.building import by_proof
from anyattn.core.capabilities import BackendRecord, CapabilityRow, ModelKind, Proof

__all__ = ["RECORDS"]


def _on_hopper(*rows: CapabilityRow) -> tuple[CapabilityRow, ...]:
    """Rows that the conformance kit has run on an H200, as far as they are of its architecture."""
    return tuple(part for row in rows for part in by_proof(row, {"cuda:sm90": Proof.HARDWARE}))


RECORDS = (
    BackendRecord(
        name="flashinfer",
        summary="FlashInfer's paged, ragged and MLA wrappers, planned on the host",
        rows=_on_hopper(*cuda_flashinfer.DENSE_ROWS, *cuda_mla.FLASHINFER_MLA_ROWS),
        targets={
            ModelKind.DENSE: "anyattn.backends.cuda.flashinfer:FlashInfer",
            ModelKind.MLA: "anyattn.backends.cuda.flashinfer_mla:FlashInferMLA",
        },
    ),
    BackendRecord(
        name="fa3",
        summary="FlashAttention-3 from sglang-kernel, vLLM's bundle or tokenspeed-fa3",
        rows=(*cuda_flash.FA3_DENSE_ROWS, *cuda_flash.FA3_MLA_ROWS),
        targets={
            ModelKind.DENSE: "anyattn.backends.cuda.flash_attention:FlashAttention3",
            ModelKind.MLA: "anyattn.backends.cuda.flash_mla_qv:FlashLatent3",
        },
    ),
    BackendRecord(
        name="fa4",
        summary="FlashAttention-4 (CuTe DSL), where it reads paged KV",
        rows=(*cuda_flash.FA4_DENSE_ROWS, *cuda_flash.FA4_MLA_ROWS),
        targets={
            ModelKind.DENSE: "anyattn.backends.cuda.flash_attention:FlashAttention4",
            ModelKind.MLA: "anyattn.backends.cuda.flash_mla_qv:FlashLatent4",
        },
    ),
    BackendRecord(
        name="flashmla",
        summary="FlashMLA's dense decode; the prefill beside it is another backend's",
        rows=_on_hopper(*cuda_mla.FLASHMLA_ROWS),
        targets={ModelKind.MLA: "anyattn.backends.cuda.flashmla:FlashMLA"},
    ),
    BackendRecord(
        name="trtllm_mha",
        summary="TensorRT-LLM kernels in FlashInfer: trtllm-gen on SM100, SM103; XQA on SM90, SM120, SM121",
        rows=cuda_mha.TRTLLM_MHA_ROWS,
        targets={ModelKind.DENSE: "anyattn.backends.cuda.trtllm_mha:TrtllmMHA"},
    ),
    BackendRecord(
        name="trtllm_mla",
        summary="trtllm-gen MLA in FlashInfer, SM100 and SM103 only",
        rows=cuda_mla.TRTLLM_MLA_ROWS,
        targets={ModelKind.MLA: "anyattn.backends.cuda.trtllm_mla:TrtllmMLA"},
    ),
    BackendRecord(
        name="cutedsl_mla",
        summary="CuTe DSL MLA decode of tokenspeed-mla or FlashInfer, SM100 and SM103",
        rows=cuda_mla.CUTEDSL_MLA_ROWS,
        targets={ModelKind.MLA: "anyattn.backends.cuda.cutedsl_mla:CuteDslMLA"},
        deprecated_aliases=("tokenspeed_mla",),
    ),
    BackendRecord(
        name="hpc_ops",
        summary="Tencent's kernels for SM90: D 128, groups of 4 and 8",
        rows=cuda_mha.HPC_OPS_ROWS,
        targets={ModelKind.DENSE: "anyattn.backends.cuda.hpc_ops:HpcOps"},
    ),
)
