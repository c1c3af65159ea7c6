"""Backends that one compiler carries over vendors: `triton` (our kernels) and `flex_attention` (torch's)."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    E4M3,
    E4M3_FNUZ,
    E5M2,
    HALVES,
    HND,
    LATENT,
    MATERIALISED,
    NHD,
    PREFILL,
    TRITON,
    VERIFY,
    block_table,
    by_proof,
    per_dtype,
    square,
)
from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Proof,
)

__all__ = ["RECORDS"]

# --- triton ----------------------------------------------------------------------------------------
# What the kernels are specified to do. `proof` stays UNTESTED until they exist and the kit has run.

_BOTH = (*arch.SM89_UP, *arch.GFX950, *arch.GFX12)
_FP8: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # Triton 3.7's compiler options: e4m3fn from SM89 on; AMD converts what the chip has natively, the rest
    # in software, which isn't declared.
    (arch.SM80_86, (E5M2,)),
    (_BOTH, (E4M3, E5M2)),
    (arch.GFX942, (E4M3_FNUZ,)),
    ((*arch.GFX90A, *arch.GFX11), ()),
)
_FP8_MLA = (
    (arch.SM80_86, (E5M2,)),
    ((*arch.SM89_UP, *arch.GFX950), (E4M3, E5M2)),
    (arch.GFX942, (E4M3_FNUZ,)),
    (arch.GFX90A, ()),
    (arch.GFX11, ()),
    (arch.GFX12, (E4M3, E5M2)),
)

_MASKS = (Feature.LSE, Feature.EXPLICIT_MASK, Feature.TREE_VERIFY, Feature.RAGGED_VERIFY)
_SCALED = (Feature.CUSTOM_SCALE, Feature.KV_SCALES)
_KINDS = (Feature.BIDIRECTIONAL, Feature.ENCODER_ONLY, Feature.CROSS)
_SHARED = (Feature.WINDOW, Feature.LOGIT_CAP, Feature.SINKS, *_SCALED, *_MASKS, *_KINDS)

_COMMON: dict[str, Any] = {
    "requires": (TRITON,),
    "pages": ANY_PAGE,
    "form": FormSpec("request_table"),
    "determinism": 1,  # splits follow the batch's size: not batch-invariant
    "tolerates_nan_tail": True,
}
_PHASES: tuple[dict[str, Any], ...] = (
    # The grid of an extend is sized by the longest one; decode needs no length on the host.
    {"phases": (PREFILL, VERIFY), "host_lengths": 1, "graph": 1, "method": "extend"},
    {"phases": (DECODE, DRAFT), "host_lengths": 0, "graph": 2, "method": "split-KV decode"},
)


_ONE_PASS: tuple[dict[str, Any], ...] = (
    # Batch-invariant: one tile for every shape and no splits, whatever the phase.
    {
        "phases": (PREFILL, VERIFY, DECODE, DRAFT),
        "determinism": 2,
        "host_lengths": 1,
        "graph": 1,
        "method": "extend in one pass, anchored tiles",
    },
)

_MLA_PHASES: tuple[dict[str, Any], ...] = (
    # The second pair is the materialised prefill, on the dense extend.
    {
        **_PHASES[0],
        "method": "extend, absorbed or materialised",
        "head_dims": HeadDims(pairs=(LATENT, MATERIALISED)),
    },
    {**_PHASES[1], "method": "absorbed split-KV decode", "head_dims": HeadDims(pairs=(LATENT,))},
)


def _triton(
    architectures: tuple[str, ...],
    fp8: tuple[str, ...],
    dtypes: tuple[str, ...],
    phases: tuple[dict[str, Any], ...] = _PHASES,
    **fields: Any,
) -> tuple[CapabilityRow, ...]:
    """Rows of every phase, for KV of the model's dtype or of the chip's fp8 kinds."""
    common = {**_COMMON, **fields}
    return tuple(
        row
        for phase in phases
        for row in per_dtype(*dtypes, fp8=fp8, architectures=architectures, **common | phase)
    )


_NARROW = HeadDims(minimum=16, maximum=128, multiple=16, equal=False)
_HEADS = HeadDims(minimum=16, maximum=256, multiple=16, equal=False)
_DENSE: dict[str, Any] = {
    "layouts": (NHD, HND),
    "features": (*_SHARED, Feature.NO_CACHE_WRITE),
    "source": "own kernels: tiles from triton-on-h200 A, B; docs/compile-table.md",
}
_INVARIANT: dict[str, Any] = {"features": _SHARED}
_COMPILED = (*arch.SM80_86, "cuda:sm89", "cuda:sm100", *arch.SM120, *arch.GFX90A, *arch.GFX942_950,
             "rocm:gfx1100", "rocm:gfx1201")  # fmt: skip
_PROOFS = {"cuda:sm90": Proof.HARDWARE, **dict.fromkeys(_COMPILED, Proof.CROSS_COMPILED)}
"""Chips that the kernels ran on, judged by the oracle, and chips that they were compiled for."""
_WIDE = "spills: operands of 256 fill the registers of a thread (docs/compile-table.md)"


def _dense(chips: tuple[str, ...], fp8: tuple[str, ...]) -> tuple[CapabilityRow, ...]:
    """Heads up to 256. On RDNA wide ones are right but slow: in float32, on RDNA 3 in every type."""
    rows: tuple[CapabilityRow, ...] = ()
    for dtypes, spilling in ((HALVES, arch.GFX11), (("float32",), arch.GFX11_12)):
        clean = tuple(chip for chip in chips if chip not in spilling)
        slow = tuple(chip for chip in chips if chip in spilling)
        if clean:
            rows += _triton(clean, fp8, dtypes, head_dims=_HEADS, **_DENSE)
            rows += _triton(clean, fp8, dtypes, _ONE_PASS, head_dims=_HEADS, **_DENSE | _INVARIANT)
        if slow:
            # The wider row first: where neither will do, it is the one that is quoted.
            rows += _triton(slow, fp8, dtypes, head_dims=_HEADS, degraded=_WIDE, **_DENSE)
            rows += _triton(slow, fp8, dtypes, head_dims=_NARROW, **_DENSE)
            rows += _triton(slow, fp8, dtypes, _ONE_PASS, head_dims=_NARROW, **_DENSE | _INVARIANT)
    return tuple(part for row in rows for part in by_proof(row, _PROOFS))


_TRITON_DENSE = tuple(row for chips, fp8 in _FP8 for row in _dense(chips, fp8))

_SMALL_LDS = "rows of 576 in 64 KiB of LDS leave tiles of 16"

_TRITON_MLA = tuple(
    part
    for chips, fp8 in _FP8_MLA
    for row in _triton(
        chips,
        fp8,
        HALVES,
        _MLA_PHASES,
        kinds=(ModelKind.MLA,),
        layouts=(NHD, HND),
        features=(Feature.LOGIT_CAP, Feature.Q_ROPE, *_SCALED, *_MASKS),
        determinism=2,  # asked for: no splits, one tile size, absorbed always
        degraded=_SMALL_LDS if chips in (arch.GFX11, arch.GFX12) else None,
        source="own kernels: sglang-facts §3.1, §4.1 (SGLang's default on SM80 "
        "to SM89, SM120 and for most head counts on HIP); LDS budget: ROCm/aiter#5229",
    )
    for part in by_proof(row, {"cuda:sm90": Proof.HARDWARE}, Proof.INTERPRETER)
)

# --- flex_attention --------------------------------------------------------------------------------

_FLEX_SHARED = (
    Feature.WINDOW,
    Feature.LOGIT_CAP,
    Feature.SINKS,
    Feature.LSE,
    Feature.BIDIRECTIONAL,
    Feature.CUSTOM_SCALE,
    Feature.RAGGED_VERIFY,
)
_FLEX_GATHERED = (*_FLEX_SHARED, Feature.KV_SCALES, Feature.ENCODER_ONLY, Feature.NO_CACHE_WRITE)
_FLEX_PHASES: tuple[dict[str, Any], ...] = (
    # Tiles of queries are laid out on the host; in decode each is one token. Chains of drafts alone.
    {"phases": (PREFILL, VERIFY, DRAFT), "host_lengths": 2},
    {"phases": (DECODE,), "host_lengths": 1},
)


def _flex(*dtypes: str, **fields: Any) -> tuple[CapabilityRow, ...]:
    """Rows of every phase. Run to run the same: no atomics; tiles and splits don't depend on the run."""
    rows = (row for phase in _FLEX_PHASES for row in per_dtype(*dtypes, determinism=1, **fields | phase))
    return tuple(part for row in rows for part in by_proof(row, {"cuda:sm90": Proof.HARDWARE}, row.proof))


# Heads of a group are rows of one block of the mask in decode, which has 128; up to 72 ran on an H200.
_FLEX_GROUPS = tuple(range(1, 129))

_FLEX_PAGED: dict[str, Any] = {
    "architectures": arch.CUDA,
    "group_sizes": _FLEX_GROUPS,
    "requires": (TRITON,),
    "head_dims": HeadDims(pairs=square(64, 128, 256)),
    "pages": PageSizes((16, 32, 64, 128)),  # a page is a block of the mask; a block holds tiles of 16 or more
    "form": block_table(),
    "layouts": (NHD,),  # one long row of keys
    "features": _FLEX_SHARED,
    "method": "paged, one block of the mask a page",
    "degraded": "no split-KV decode and no graphs: a cross-check, not a serving path",
    "source": "vendor-apis §11.3; the lowering of torch 2.13: a block of the mask is a multiple of BLOCK_N",
}
_FLEX_SLOTS: dict[str, Any] = {
    "pages": ANY_PAGE,
    "form": FormSpec("token_csr", kernel_page=1),
    "layouts": (NHD, HND),
    "features": _FLEX_GATHERED,
    "tolerates_nan_tail": True,
    "method": "gathered KV",
}

_FLEX_ROWS = (
    *_flex(*HALVES, "float32", **_FLEX_PAGED),
    *(
        row
        for chips, fp8 in ((arch.SM80_86, (E5M2,)), (arch.SM89_UP, (E4M3, E5M2)))
        for row in _flex(
            *HALVES,
            "float32",
            fp8=fp8,
            architectures=chips,
            group_sizes=_FLEX_GROUPS,
            requires=(TRITON,),
            head_dims=HeadDims(pairs=square(64, 128, 256)),
            degraded="gathers the KV of every layer: a cross-check, not a serving path",
            source="vendor-apis §11.3, sglang-facts §3.1; other head sizes and ROCm: no fact",
            **_FLEX_SLOTS,
        )
    ),
    *_flex(
        *HALVES,
        "float32",
        architectures=arch.CPU,
        head_dims=HeadDims(maximum=256, equal=False),
        degraded="eager, scores are spelled out: torch compiles none for CPUs that returns the log-sum-exp",
        source="vendor-apis §11.3, hardware-free-checks §2.2 (torch 2.13)",
        proof=Proof.CPU,
        **_FLEX_SLOTS,
    ),
)

RECORDS = (
    BackendRecord(
        name="triton",
        summary="own Triton kernels: split-KV decode, extend over prefix and new tokens, MLA, verify masks",
        rows=(*_TRITON_DENSE, *_TRITON_MLA),
        targets={
            ModelKind.DENSE: "anyattn.backends.portable.triton:TritonAttention",
            ModelKind.MLA: "anyattn.backends.portable.triton_mla:TritonMLA",
        },
    ),
    BackendRecord(
        name="flex_attention",
        summary="torch.nn.attention.flex_attention on paged or gathered KV",
        rows=_FLEX_ROWS,
        targets={ModelKind.DENSE: "anyattn.backends.portable.flex_attention:FlexAttention"},
    ),
)
