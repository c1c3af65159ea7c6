"""Ascend: which backend to prefer on which chip, with the evidence. Data only."""

from __future__ import annotations

from anyattn.core.capabilities import ModelKind, Phase, Preference

__all__ = ["PREFERENCES"]

PREFERENCES: tuple[Preference, ...] = (
    *(
        Preference(
            architectures=("ascend:910b", "ascend:910c", "ascend:310p"),
            phase=phase,
            order=("ascend", "torch_native"),
            evidence="not measured: vllm-ascend and SGLang use nothing else here",
            date="2026-10-30",
            library="torch-npu 2.14.0",
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
    *(
        Preference(
            architectures=("ascend:910b", "ascend:910c"),
            phase=phase,
            kind=ModelKind.MLA,
            order=("ascend", "torch_native"),
            evidence="not measured: vllm-ascend and SGLang use nothing else here",
            date="2026-10-30",
            library="torch-npu 2.14.0",
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
    *(
        Preference(
            architectures=("ascend:310p",),
            phase=phase,
            kind=ModelKind.MLA,
            order=("torch_native",),
            evidence="not measured: nothing else has latent attention here",
            date="2026-11-29",
        )
        for phase in (Phase.PREFILL, Phase.DECODE)
    ),
)
