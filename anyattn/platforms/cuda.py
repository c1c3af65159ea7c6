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
        evidence="H200, 32/8 heads, D 128, us: 8k prompts FA3 857, Triton 890, FlashInfer 915; 8 x 512 on 16k"
        " cached FA3 2,001, Triton 1,819, FlashInfer 2,153; decode with a chunk of 2k FA3 624, Triton 592, "
        "FlashInfer 1,560; over 13 prompts alone all three are within 12 %, FA3 ahead on most",
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
        evidence="H200, us under graphs: 64 x 8k, 32/8 heads, D 128 Triton 491, FlashInfer 498, FA3 520; 256 "
        "chat-like requests 644, 694, 701; one of 128k beside 31 of 1k 168, 930, 172; 64 x 2k, 4 drafts each "
        "134, 633, 162; 64 x 8k of fp8 266, 413, 417",
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
        evidence="H200: 128 heads, 64 × 8k FlashMLA 557 TFLOP/s, FlashInfer 531; 16 heads, 128 × 4k 3,588 "
        "and 3,781 GB/s",
        date="2026-11-29",
        library="flashinfer-python 0.7.2.post1",
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
