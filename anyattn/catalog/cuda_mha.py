"""Rows of block-table kernels for dense models that need no plan: `trtllm_mha` and `hpc_ops`.

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
    NHD,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import CapabilityRow, Feature, HeadDims, PageSizes, Phase, Proof, Provider

__all__ = ["HPC_OPS_ROWS", "TRTLLM_MHA_ROWS"]

_FEATURES = (Feature.WINDOW, Feature.SINKS, Feature.CUSTOM_SCALE, Feature.KV_SCALES)

# --- trtllm_mha ------------------------------------------------------------------------------------

_GEN: dict[str, Any] = {
    "architectures": arch.SM100_103,
    "providers": (FLASHINFER_07,),
    "runtime": ">=12.8",
    "fp8": (E4M3,),
    # With 8-bit KV queries are rounded to 8 bits too: no context kernel takes the two apart.
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


_XQA_GROUPS = (*range(1, 17), *range(25, 33))
"""A group is a tile of rows, which are rounded up to 8, 16 or 32. With FlashInfer 0.7.2.post1 and nvcc 13.0,
1 to 7, 10, 12, 14, 16, 28 and 32 heads of one KV head compiled and were right on an H200 (D 128); 20, 24, 40,
48, 56 and 72 didn't compile. 64 did, up to D 128.
"""
_XQA_DRAFT_TILE = 32
"""Rows of a program that verifies (defines.h: M_TILESIZE)."""


def _xqa(
    architectures: tuple[str, ...], runtime: str, phases: tuple[Phase, ...], **fields: Any
) -> tuple[CapabilityRow, ...]:
    """XQA: one kernel for decode and chain verification; no LSE, no cap.

    On SM90 decode over fp8 KV has a kernel of its own, whose products are of 8 bits: queries are rounded.
    """
    common: dict[str, Any] = {
        "head_dims": HeadDims(minimum=16, maximum=256, multiple=16),
        "group_sizes": _XQA_GROUPS,
        "pages": PageSizes((16, 32, 64, 128)),
        "form": block_table(),
        "layouts": (NHD, HND),
        "features": _FEATURES,
        "host_lengths": 1,
        "graph": 1,
        "method": "xqa",
        "source": "vendor-apis §2.8, §1.4; flashinfer/xqa.py of 0.7.2 (ragged drafts: q_cu_seq_lens); sinks "
        "on SM12x: flashinfer#4070; prefill there is fmha_v2 (sglang-facts §3.1), whose call has no recorded "
        "fact",
    }
    return per_dtype(
        *HALVES,
        fp8=(E4M3,),
        phases=phases,
        architectures=architectures,
        providers=(FLASHINFER_07,),
        runtime=runtime,
        **{**common, **fields},
    )


def _xqa_verify(architectures: tuple[str, ...], runtime: str, **fields: Any) -> tuple[CapabilityRow, ...]:
    """Sinks only where a tile of rows begins with a group's first head: `mha.cu` counts heads from the start
    of each tile, so other groups' drafts got other heads' sinks (15 and 31 heads, H200).

    The row without sinks is for all groups and comes first: sinks, not heads, are what is refused to others.
    """
    even = tuple(group for group in _XQA_GROUPS if _XQA_DRAFT_TILE % group == 0)
    plain = tuple(feature for feature in _FEATURES if feature is not Feature.SINKS)
    return tuple(
        row
        for groups, features in ((_XQA_GROUPS, plain), (even, _FEATURES))
        for row in _xqa(
            architectures, runtime, (VERIFY,), group_sizes=groups,
            features=(*features, Feature.RAGGED_VERIFY), **fields,
        )
    )  # fmt: skip


# Larger heads hold their queries in shared memory: no drafts, and groups of 16 at most (jit/xqa.py).
_WIDE: dict[str, Any] = {
    "head_dims": HeadDims(minimum=272, maximum=512, multiple=16),
    "group_sizes": tuple(range(1, 17)),
}

TRTLLM_MHA_ROWS = (
    *_TRTLLM_GEN,
    *_xqa(arch.SM90, "", (DECODE,), method="xqa with 8-bit products", proof=Proof.HARDWARE),
    *_xqa_verify(arch.SM90, "", proof=Proof.HARDWARE),
    *_xqa(arch.SM120, ">=12.8", (DECODE,)),
    *_xqa(arch.SM120, ">=12.8", (DECODE,), **_WIDE),
    *_xqa_verify(arch.SM120, ">=12.8"),
    *_xqa(arch.SM121, ">=12.9", (DECODE,)),
    *_xqa(arch.SM121, ">=12.9", (DECODE,), **_WIDE),
    *_xqa_verify(arch.SM121, ">=12.9"),
)

# --- hpc_ops -----------------------------------------------------------------------------------------

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
