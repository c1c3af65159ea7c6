"""Deliberate faults in the real code: a kit is worth what it catches.

`anyattn verify BACKEND --mutants` applies them one at a time. Ones with a `report` are taken from public
threads in which that fault was found in some serving system.
"""

from __future__ import annotations

from anyattn.testing.mutants import (
    aiter,
    ascend,
    core,
    flash,
    flashinfer,
    hpc_ops,
    intel_amx,
    native,
    outsider,
    triton,
    triton_verify,
    wave,
)
from anyattn.testing.mutants.patching import Mutant, MutantError, applied

__all__ = ["MUTANTS", "Mutant", "MutantError", "applied"]

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "torch_native": (*native.MUTANTS, *core.MUTANTS, *outsider.MUTANTS),
    "triton": (*triton.MUTANTS, *triton_verify.MUTANTS),
    "fa3": flash.FA3,
    "fa4": flash.FA4,
    "aiter": aiter.MUTANTS,
    "ascend": ascend.MUTANTS,
    "hpc_ops": hpc_ops.MUTANTS,
    "intel_amx": intel_amx.MUTANTS,
    "flashinfer": flashinfer.MUTANTS,
    "wave": wave.MUTANTS,
}
"""By the backend that shows them."""
