"""What anyattn reads before anything else: a platform and two backends, as strings and numbers.

This module imports neither torch nor the driver. Everything that does stands behind a `module:name` path, and
is imported only when one of these backends has been chosen and is being built.
"""

from __future__ import annotations

from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Phase,
    Preference,
    Proof,
)
from anyattn.core.platform_record import PlatformRecord, SimulatedHost

__all__ = ["FLASH", "PLATFORM", "STREAM"]

CONTRACT = 1
"""The contract that this package was written for. A number of its own: not anyattn's constant."""

_GIB = 1 << 30
_BOTH = ("lumen:l1", "lumen:l2")


def _prefer(architecture: str, phase: Phase, *order: str) -> Preference:
    return Preference(
        architectures=(architecture,),
        phase=phase,
        order=(*order, "torch_native"),
        evidence="not measured: the chip is imaginary",
        date="2026-11-29",
        library="anyattn-lumen 0.1.0",
    )


PLATFORM = PlatformRecord(
    name="lumen",
    summary="Lumen accelerators (imaginary)",
    device="cpu",  # a real one registers a device type of its own with torch
    hosts={
        "l1": SimulatedHost("Lumen L1", 32 * _GIB, 16),
        "l2": SimulatedHost("Lumen L2", 96 * _GIB, 64),
    },
    preferences=(
        _prefer("lumen:l1", Phase.PREFILL, "lumen_flash"),
        _prefer("lumen:l1", Phase.DECODE, "lumen_flash"),
        _prefer("lumen:l2", Phase.PREFILL, "lumen_flash"),
        _prefer("lumen:l2", Phase.DECODE, "lumen_stream", "lumen_flash"),
    ),
    detect="anyattn_lumen.detection:look",
    graph="anyattn_lumen.graphs:LumenGraphs",
    runtime="1.0",
    contract=CONTRACT,
)

FLASH = BackendRecord(
    name="lumen_flash",
    summary="paged attention over pages of 16, both chips",
    rows=(
        CapabilityRow(
            phases=(Phase.PREFILL, Phase.DECODE),
            architectures=_BOTH,
            head_dims=HeadDims(pairs=((64, 64), (128, 128))),
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16",),
            pages=PageSizes((16,)),
            form=FormSpec("block_table", kernel_page=16),
            features=(Feature.LSE, Feature.CUSTOM_SCALE),
            determinism=1,
            host_lengths=0,
            graph=2,
            tolerates_nan_tail=True,
            method="flash, pages of 16",
            proof=Proof.EMULATED,
            source="the driver's manual, had there been one; judged by anyattn's kit on the driver in torch",
        ),
    ),
    targets={ModelKind.DENSE: "anyattn_lumen.flash:LumenFlash"},
    contract=CONTRACT,
)

STREAM = BackendRecord(
    name="lumen_stream",
    summary="decode for long contexts from lists of slots, L2 alone",
    rows=(
        CapabilityRow(
            phases=(Phase.DECODE,),
            architectures=("lumen:l2",),
            head_dims=HeadDims(minimum=16, maximum=256, multiple=16),
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16",),
            pages=PageSizes(multiple_of=1),
            form=FormSpec("token_csr", kernel_page=1),
            features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.WINDOW, Feature.LOGIT_CAP),
            determinism=1,
            host_lengths=0,
            graph=2,
            tolerates_nan_tail=True,
            method="streamed slots",
            proof=Proof.EMULATED,
            source="as lumen_flash",
        ),
    ),
    targets={ModelKind.DENSE: "anyattn_lumen.stream:LumenStream"},
    contract=CONTRACT,
)
