"""Rows of `flashinfer` for dense models: its paged and ragged wrappers. Those for MLA are in `cuda_mla`.

FlashInfer chooses an inner kernel by itself (`auto`), which changed between releases and, for MLA on
SM100, changes from step to step. Each row names one inner kernel instead; the adapter passes that name.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    E4M3,
    E5M2,
    FLASHINFER_07,
    HALVES,
    HND,
    NHD,
    PREFILL,
    VERIFY,
    per_dtype,
    square,
)
from anyattn.core.capabilities import (
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    Phase,
    Provider,
)

__all__ = ["DENSE_ROWS", "EACH_TOOLKIT", "FLASHINFER"]

FLASHINFER = Provider("flashinfer-python", ">=0.6", ("flashinfer",))
_LARGE_HEADS = Provider("flashinfer-python", ">=0.6.16", ("flashinfer",))
_LARGE_HEADS_FP8 = FLASHINFER_07

EACH_TOOLKIT: tuple[tuple[tuple[str, ...], str], ...] = (
    # CUDA that can compile for the chip (vendor-apis §2.2; SM110: flashinfer/utils.py of 0.7.2).
    (arch.SM80_86_89, ""),
    (arch.SM90, ""),
    ((*arch.SM100_103, *arch.SM120), ">=12.8"),
    (arch.SM121, ">=12.9"),
    (("cuda:sm110",), ">=13.0"),
)

_PLANNED: dict[str, Any] = {
    # `plan` reads offsets on the host; under a graph the batch size is fixed.
    "host_lengths": 2,
    "graph": 1,
    "pages": ANY_PAGE,
    "form": FormSpec("page_csr"),
    "layouts": (NHD, HND),
}
_FA2_FEATURES = (
    Feature.WINDOW,
    Feature.LOGIT_CAP,
    Feature.LSE,
    Feature.CUSTOM_SCALE,
    Feature.EXPLICIT_MASK,
    Feature.TREE_VERIFY,
    Feature.RAGGED_VERIFY,
)
_PREFILL_FA3 = per_dtype(
    *HALVES,
    phases=(PREFILL, VERIFY),
    architectures=arch.SM90,
    providers=(FLASHINFER,),
    runtime=">=12.3",
    head_dims=HeadDims(pairs=square(64, 128, 256)),
    features=(
        Feature.WINDOW,
        Feature.LOGIT_CAP,
        Feature.LSE,
        Feature.CUSTOM_SCALE,
        Feature.RAGGED_VERIFY,
    ),
    determinism=1,
    method="fa3, ragged + paged",
    source="vendor-apis §2.3 (auto rule), §2.5, §2.6; one stride for paged K and V, so Dv = D: "
    "batch_prefill_sm90.cu of 0.7.2",
    **_PLANNED,
)


_FA2_ON_SM90 = "the fa2 template reaches about half of fa3's rate on Hopper, where arithmetic decides"


def _by_weight(architectures: tuple[str, ...]) -> tuple[tuple[tuple[Phase, ...], str | None], ...]:
    """All phases; on SM90 prefill apart, as second-rate (other-systems D1: FA3 is 1.5 to 2 × FA2)."""
    if architectures == arch.SM90:
        return (((DECODE, VERIFY, DRAFT), None), ((PREFILL,), _FA2_ON_SM90))
    return (((PREFILL, DECODE, VERIFY, DRAFT), None),)


def _fa2(architectures: tuple[str, ...], runtime: str) -> tuple[CapabilityRow, ...]:
    """The fa2 template, which every chip since SM80 runs: the general kernel and its special forms."""
    common: dict[str, Any] = {"architectures": architectures, "runtime": runtime, **_PLANNED}
    everything = (PREFILL, DECODE, VERIFY, DRAFT)
    general = {"providers": (FLASHINFER,), "head_dims": HeadDims(pairs=square(64, 128, 256)), **common}
    return (
        *(
            row
            for phases, degraded in _by_weight(architectures)
            for row in (
                *per_dtype(
                    *HALVES,
                    phases=phases,
                    features=_FA2_FEATURES,
                    determinism=1,
                    degraded=degraded,
                    method="fa2, tensor cores",
                    source="vendor-apis §2.3 to §2.5; tiles follow the batch's average query length, so a "
                    "row's sums differ when it is re-chunked: scheduler.cuh of 0.7.2",
                    **general,
                ),
                *per_dtype(
                    *HALVES,
                    phases=phases,
                    fp8=(E4M3, E5M2),
                    same=False,
                    features=(*_FA2_FEATURES, Feature.KV_SCALES),
                    determinism=1,
                    degraded=degraded,
                    method="fa2, tensor cores, fp8 KV",
                    source="vendor-apis §2.3 (fp8 KV under 16-bit Q keeps fa3 out), vllm#24577",
                    **general,
                ),
            )
        ),
        # A window bounds the left side only, so none is declared where later keys are visible.
        *per_dtype(
            *HALVES,
            phases=(PREFILL, DECODE),
            features=(
                Feature.BIDIRECTIONAL,
                Feature.ENCODER_ONLY,
                Feature.CROSS,
                Feature.LOGIT_CAP,
                Feature.LSE,
                Feature.CUSTOM_SCALE,
            ),
            determinism=1,
            method="not causal",
            source="vendor-apis §2.5, §2.6; window and cross exclude each other: sglang-facts §3.1",
            **general,
        ),
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_LARGE_HEADS,),
            head_dims=HeadDims(pairs=square(512)),
            features=_FA2_FEATURES,
            determinism=1,
            method="fa2, large heads",
            source="vendor-apis §2.3; flashinfer#3739 (SM80 and later), flashinfer#3576 (SM120, SM121)",
            **common,
        ),
        *per_dtype(
            *HALVES,
            phases=everything,
            providers=(_LARGE_HEADS_FP8,),
            fp8=(E4M3,),
            same=False,
            head_dims=HeadDims(pairs=square(512)),
            features=(*_FA2_FEATURES, Feature.KV_SCALES),
            determinism=1,
            method="fa2, large heads, fp8 KV",
            source="flashinfer/jit/attention/modules.py of 0.7.2; flashinfer#5044",
            **common,
        ),
    )


_SINKS_ELSEWHERE = "unmeasured variant of the prefill kernel; engines take FA3, XQA, trtllm-gen or Triton"


def _sinks(architectures: tuple[str, ...], runtime: str) -> tuple[CapabilityRow, ...]:
    """`run(sinks=)` of the plain wrappers is accepted and dropped by fa2 and fa3 (vllm#52148): only the
    wrapper built for sinks applies them. It has no cap, no mask and no fp8 form. Engines use it for
    prefill on SM120 and SM121 alone."""
    used = architectures in (arch.SM120, arch.SM121)
    first: tuple[str | None, str] = (None if used else _SINKS_ELSEWHERE, _SINKS_ELSEWHERE)
    return tuple(
        row
        for phases, degraded in zip(((PREFILL, VERIFY), (DECODE, DRAFT)), first, strict=True)
        for row in per_dtype(
            *HALVES,
            phases=phases,
            architectures=architectures,
            providers=(FLASHINFER_07,),
            runtime=runtime,
            head_dims=HeadDims(pairs=square(64, 128)),
            features=(Feature.WINDOW, Feature.SINKS, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
            determinism=1,
            degraded=degraded,
            method="attention-sink wrapper",
            source="flashinfer/attention/_core.py of 0.7.2; flashinfer#4070, vllm#52148",
            **_PLANNED,
        )
    )


_SINK_CHIPS = (
    (arch.SM80_86_89, ""),
    (arch.SM90, ""),
    (arch.SM100_103, ">=12.8"),
    (arch.SM120, ">=12.8"),
    (arch.SM121, ">=12.9"),
)

DENSE_ROWS = (
    *_PREFILL_FA3,
    *(row for chips, runtime in EACH_TOOLKIT for row in _fa2(chips, runtime)),
    *(row for chips, runtime in _SINK_CHIPS for row in _sinks(chips, runtime)),
)
