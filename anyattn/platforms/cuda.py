"""NVIDIA: which backend to prefer on which chip, with the evidence. Data only."""

from __future__ import annotations

from anyattn.core.capabilities import ModelKind, Phase, Preference

__all__ = ["PREFERENCES"]

_SM80_86_89 = ("cuda:sm80", "cuda:sm86", "cuda:sm89")
_SM90 = ("cuda:sm90",)
_SM100_103 = ("cuda:sm100", "cuda:sm103")
_SM110 = ("cuda:sm110",)
_SM120_121 = ("cuda:sm120", "cuda:sm121")

_MEASURED = "flashinfer-python 0.7.2.post1, tokenspeed-fa3 3.0.0.post20260810, torch 2.11+cu130"
_SGLANG = "sglang 0.5.23, flashinfer-python 0.7.2"

_DENSE = (
    Preference(
        architectures=_SM90,
        phase=Phase.PREFILL,
        order=("fa3", "triton", "flashinfer", "fa4", "hpc_ops", "flex_attention", "torch_native"),
        evidence="H200 at 58f9e1d, 32/8 heads, D 128, us: 8k prompts FA3 861.9, Triton 882.6, FlashInfer "
        "908.5; 8 x 512 on 16k cached FA3 1,997.8, Triton 1,828.0, FlashInfer 2,159.3; decode with a chunk "
        "of 2k FA3 610.1, Triton 573.5, FlashInfer 1,526.2; of 12 steps of prompts alone FA3 is first in 6, "
        "Triton in 4, FlashInfer in 2",
        date="2026-11-30",
        library=_MEASURED,
    ),
    Preference(
        architectures=_SM90,
        phase=Phase.DECODE,
        order=(
            "triton",
            "flashinfer",
            "fa3",
            "trtllm_mha",
            "hpc_ops",
            "flex_attention",
            "fa4",
            "torch_native",
        ),
        evidence="H200 at 58f9e1d, us under graphs: 64 x 8k, 32/8 heads, D 128 Triton 480.7, FlashInfer "
        "485.8, FA3 508.6; 256 chat-like requests 633.1, 676.5, 682.6; one of 128k beside 31 of 1k 162.8, "
        "935.8, 169.7; 64 x 2k, 4 drafts each 131.9, 616.2, 158.4; 64 x 8k of fp8 262.4, 408.4, 415.1",
        date="2026-11-30",
        library=_MEASURED,
    ),
    Preference(
        architectures=_SM100_103,
        phase=Phase.PREFILL,
        order=("trtllm_mha", "fa4", "flashinfer", "triton", "flex_attention", "torch_native"),
        evidence="not measured here: SGLang's and vLLM's default; FA4's fast path wants pages of 128, which "
        "trtllm-gen's decode doesn't list",
        date="2026-10-30",
        library=_SGLANG,
    ),
    Preference(
        architectures=_SM100_103,
        phase=Phase.DECODE,
        order=("trtllm_mha", "flashinfer", "fa4", "triton", "flex_attention", "torch_native"),
        evidence="not measured here: SGLang's and vLLM's default",
        date="2026-10-30",
        library=_SGLANG,
    ),
    Preference(
        architectures=_SM110,
        phase=Phase.PREFILL,
        order=("fa4", "flashinfer", "triton", "flex_attention", "torch_native"),
        evidence="not measured: FA4 is written for this tensor core, FlashInfer runs its SM80 template here",
        date="2026-11-29",
    ),
    Preference(
        architectures=_SM110,
        phase=Phase.DECODE,
        order=("flashinfer", "fa4", "triton", "flex_attention", "torch_native"),
        evidence="not measured: decode is bound by memory, and FlashInfer takes any page",
        date="2026-11-29",
    ),
    Preference(
        architectures=_SM120_121,
        phase=Phase.PREFILL,
        order=("flashinfer", "triton", "flex_attention", "torch_native"),
        evidence="not measured here: SGLang's default",
        date="2026-10-30",
        library=_SGLANG,
    ),
    Preference(
        architectures=_SM120_121,
        phase=Phase.DECODE,
        order=("flashinfer", "trtllm_mha", "triton", "flex_attention", "torch_native"),
        evidence="not measured here: SGLang's default; XQA (trtllm_mha) is vLLM's decode since 2026-08",
        date="2026-10-30",
        library=_SGLANG,
    ),
    *(
        Preference(
            architectures=_SM80_86_89,
            phase=phase,
            order=("flashinfer", "triton", "fa3", "flex_attention", "torch_native"),
            evidence="not measured here: SGLang's default, FlashInfer and then Triton",
            date="2026-10-30",
            library=_SGLANG,
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
)

_MLA = (
    Preference(
        architectures=_SM90,
        phase=Phase.PREFILL,
        kind=ModelKind.MLA,
        order=("flashinfer", "fa3", "triton", "torch_native"),
        evidence="not measured for MLA; dense 8k prompts on an H200: FlashInfer ragged 599 TFLOP/s, FA3 551",
        date="2026-11-29",
        library=_MEASURED,
    ),
    Preference(
        architectures=_SM90,
        phase=Phase.DECODE,
        kind=ModelKind.MLA,
        order=("flashmla", "flashinfer", "fa3", "triton", "torch_native"),
        evidence="H200 at 58f9e1d, us under graphs: 64 x 8k, 128 heads FlashMLA 226.0, FlashInfer 273.4, "
        "Triton 348.7; 128 x 4k, 16 heads 146.6, 146.9, 144.8; 64 chat-like requests, 16 heads 60.2, 74.9, "
        "65.9",
        date="2026-11-30",
        library="flashinfer-python 0.7.2.post1, sgl-flash-mla 1.0.0, torch 2.11+cu130",
    ),
    Preference(
        architectures=_SM100_103,
        phase=Phase.PREFILL,
        kind=ModelKind.MLA,
        order=("trtllm_mla", "flashinfer", "fa4", "triton", "torch_native"),
        evidence="not measured here: SGLang's choice for DeepSeek on SM100",
        date="2026-10-30",
        library=_SGLANG,
    ),
    Preference(
        architectures=_SM100_103,
        phase=Phase.DECODE,
        kind=ModelKind.MLA,
        order=("trtllm_mla", "cutedsl_mla", "flashinfer", "fa4", "triton", "torch_native"),
        evidence="not measured here: SGLang's choice for DeepSeek; FlashInfer's own policy leans to CuTe for "
        "large batches",
        date="2026-10-30",
        library=_SGLANG,
    ),
    *(
        Preference(
            architectures=_SM110,
            phase=phase,
            kind=ModelKind.MLA,
            order=("fa4", "flashinfer", "triton", "torch_native"),
            evidence="not measured: FA4 has absorbed MLA for this chip, FlashInfer runs its SM80 template",
            date="2026-11-29",
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
    *(
        Preference(
            architectures=_SM120_121,
            phase=phase,
            kind=ModelKind.MLA,
            order=("flashinfer", "triton", "torch_native"),
            evidence="not measured: FlashInfer's own order here is fa2, xqa; SGLang falls back to Triton",
            date="2026-10-23",
            library="flashinfer-python 0.7.2.post1",
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
    *(
        Preference(
            architectures=_SM80_86_89,
            phase=phase,
            kind=ModelKind.MLA,
            order=("triton", "flashinfer", "torch_native"),
            evidence="not measured here: SGLang's default",
            date="2026-10-30",
            library=_SGLANG,
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
)

PREFERENCES: tuple[Preference, ...] = (*_DENSE, *_MLA)
