"""Rows of `flashmla` and `hpc_ops`: kernels for SM90 alone."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    DECODE,
    E4M3,
    HALVES,
    HND,
    LATENT,
    NHD,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import Feature, HeadDims, ModelKind, PageSizes, Provider

__all__ = ["FLASHMLA_PROVIDERS", "FLASHMLA_ROWS", "HPC_OPS_ROWS"]

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

_HPC: dict[str, Any] = {
    "architectures": arch.SM90,
    "providers": (Provider("hpc-ops", "", ("hpc",)),),
    "runtime": ">=12.8",
    "head_dims": HeadDims(pairs=square(128)),
    "form": block_table(),
    "layouts": (NHD, HND),
}
_RANKS: dict[str, Any] = {
    # The fused RoPE operator that makes Q's scales exists for (8, 1) and (64, 8) heads of a rank.
    "q_heads": (8, 64),
    "kv_heads": (1, 8),
    "group_sizes": (8,),
    "features": (Feature.KV_SCALES,),
}

HPC_OPS_ROWS = (
    *per_dtype(
        "bfloat16",
        phases=(DECODE,),
        pages=PageSizes((16, 32, 64)),
        group_sizes=(4, 8),
        host_lengths=0,
        graph=1,
        method="dynamic split-K (task map)",
        source="vendor-apis §15.1, §15.3: scale 1/sqrt(128) built in; no window, cap, sinks or LSE",
        **_HPC,
    ),
    *per_dtype(
        "bfloat16",
        phases=(PREFILL,),
        # Another page launches nothing and returns uninitialised memory.
        pages=PageSizes((32, 64)),
        host_lengths=1,
        graph=0,
        method="paged prefill",
        source="vendor-apis §15.1, §1.4; verify: SGLang uses none, left out",
        **_HPC,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        phases=(DECODE,),
        pages=PageSizes((64,)),
        host_lengths=0,
        graph=1,
        method="fp8 decode",
        source="vendor-apis §15.1, §15.2, §15.4",
        **_RANKS,
        **_HPC,
    ),
    *per_dtype(
        "bfloat16",
        fp8=(E4M3,),
        same=False,
        phases=(PREFILL,),
        pages=PageSizes((32, 64)),
        host_lengths=1,
        graph=0,
        method="fp8 paged prefill",
        source="vendor-apis §15.1, §15.2",
        **_RANKS,
        **_HPC,
    ),
)
