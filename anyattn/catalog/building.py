"""Short forms for the data files: phases, layouts, libraries, and one row per model dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from anyattn.core.capabilities import CapabilityRow, FormSpec, HeadDims, PageSizes, Phase, Proof, Provider

__all__ = [
    "ANY_PAGE",
    "DECODE",
    "DRAFT",
    "E4M3",
    "E4M3_FNUZ",
    "E5M2",
    "FLASHINFER_07",
    "HALVES",
    "HND",
    "LATENT",
    "LATENTS",
    "MATERIALISED",
    "NHD",
    "PREFILL",
    "TRITON",
    "VERIFY",
    "block_table",
    "by_proof",
    "per_dtype",
    "square",
]

PREFILL, DECODE, VERIFY, DRAFT = Phase.PREFILL, Phase.DECODE, Phase.VERIFY, Phase.DRAFT
NHD, HND = "NHD", "HND"
E4M3, E4M3_FNUZ, E5M2 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"
HALVES = ("bfloat16", "float16")
ANY_PAGE = PageSizes(multiple_of=1)

LATENT = (576, 512)
"""Absorbed MLA of DeepSeek-V2/V3: latent 512 and rope 64 against latent 512."""
MATERIALISED = (192, 128)
"""The same model's materialised prefill: nope 128 and rope 64 against v 128."""
LATENTS = HeadDims(pairs=(LATENT, (320, 256)))
"""Absorbed shapes of latents of 512 and of 256, each with rope 64."""

TRITON = Provider("triton", ">=3.6,<3.10", ("triton",))
FLASHINFER_07 = Provider("flashinfer-python", ">=0.7", ("flashinfer",))


def square(*sizes: int) -> tuple[tuple[int, int], ...]:
    """(D, Dv) pairs with Dv = D."""
    return tuple((size, size) for size in sizes)


def block_table(kernel_page: int = 0, *, width_multiple: int = 1) -> FormSpec:
    """A table of page numbers `[B, width]`; 0 = the page that was chosen for the phase."""
    return FormSpec("block_table", kernel_page=kernel_page, width_multiple=width_multiple)


def per_dtype(
    *dtypes: str, fp8: tuple[str, ...] = (), same: bool = True, **fields: Any
) -> tuple[CapabilityRow, ...]:
    """One row for each model dtype, with KV of that dtype (unless `same` is False) or of one of `fp8`.

    A row is a conjunction of sets, so a bf16 model on an fp16 pool is kept out by a row per dtype.
    """
    return tuple(
        CapabilityRow(dtypes=(dtype,), kv_dtypes=(dtype, *fp8) if same else fp8, **fields) for dtype in dtypes
    )


def by_proof(
    row: CapabilityRow, known: Mapping[str, Proof], others: Proof = Proof.UNTESTED
) -> tuple[CapabilityRow, ...]:
    """One row for each way of proof among its chips: that of `known`, or `others`."""
    proofs: dict[Proof, list[str]] = {}
    for chip in row.architectures:
        proofs.setdefault(known.get(chip, others), []).append(chip)
    return tuple(
        dataclasses.replace(row, architectures=tuple(chips), proof=proof) for proof, chips in proofs.items()
    )
