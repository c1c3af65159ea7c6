"""AMD: which backend to prefer on which chip, with the evidence. Data only."""

from __future__ import annotations

from anyattn.core.capabilities import ModelKind, Phase, Preference

__all__ = ["PREFERENCES"]

_GFX942_950 = ("rocm:gfx942", "rocm:gfx950")
_GFX90A = ("rocm:gfx90a",)
_GFX11_12 = ("rocm:gfx1100", "rocm:gfx1151", "rocm:gfx1200", "rocm:gfx1201")

_BLOG = "vLLM and AMD, 2026-02-20, Instinct, TP 8"
_MAIN_PHASES = (Phase.PREFILL, Phase.DECODE)

PREFERENCES: tuple[Preference, ...] = (
    *(
        Preference(
            architectures=_GFX942_950,
            phase=phase,
            order=("aiter", "triton", "wave", "torch_native"),
            evidence=f"claim of {_BLOG}: Triton 1.08 to 1.36 × slower than AITER; not measured here",
            date="2026-02-20",
            library="vllm nightly of 2026-01-15",
        )
        for phase in _MAIN_PHASES
    ),
    *(
        Preference(
            architectures=_GFX942_950,
            phase=phase,
            kind=ModelKind.MLA,
            order=("aiter", "triton", "torch_native"),
            evidence=f"claim of {_BLOG}: AITER 1.24 to 1.52 × faster than Triton; not measured here",
            date="2026-02-20",
            library="vllm nightly of 2026-01-15",
        )
        for phase in _MAIN_PHASES
    ),
    *(
        Preference(
            architectures=_GFX90A,
            phase=phase,
            order=("triton", "wave", "torch_native"),
            evidence="not measured: AITER ships code for gfx942 and gfx950 only",
            date="2026-11-29",
        )
        for phase in _MAIN_PHASES
    ),
    *(
        Preference(
            architectures=_GFX11_12,
            phase=phase,
            order=("triton", "torch_native"),
            evidence="not measured: neither AITER nor Wave has kernels for RDNA",
            date="2026-11-29",
        )
        for phase in _MAIN_PHASES
    ),
    *(
        Preference(
            architectures=(*_GFX90A, *_GFX11_12),
            phase=phase,
            kind=ModelKind.MLA,
            order=("triton", "torch_native"),
            evidence="not measured: no library has kernels here",
            date="2026-11-29",
        )
        for phase in _MAIN_PHASES
    ),
)
