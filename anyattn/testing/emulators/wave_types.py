"""Matrix instructions as wave-lang 3.9.1 names them (`wave_lang/kernel/wave/constraints.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["GenericDot", "MMAOperand", "MMAType"]


class MMAType(Enum):
    """Those of CDNA1 to CDNA4 for 16-bit floats."""

    F32_16x16x16_F16 = 0x1020
    F32_32x32x8_F16 = 0x1021
    F32_16x16x32_K8_F16 = 0x1022
    F32_32x32x16_K8_F16 = 0x1023
    F32_32x32x16_BF16 = 0x1320
    F32_16x16x32_BF16 = 0x1321
    F32_32x32x16_F16 = 0x1322
    F32_16x16x32_F16 = 0x1323


class MMAOperand(Enum):
    """Axes of a product."""

    M = 0
    N = 1
    K = 2


@dataclass
class GenericDot:
    """A product by vector instructions."""

    out_vec_size: int = 1
    k_vec_size: int = 4
    k_mult: int = 1
    along_dim: MMAOperand = MMAOperand.N

    def __post_init__(self) -> None:
        if self.along_dim not in (MMAOperand.M, MMAOperand.N):
            raise ValueError(f"Invalid 'along_dim': {self.along_dim}.")
