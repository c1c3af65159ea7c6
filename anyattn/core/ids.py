"""Slot numbers of two kinds that must not be mixed: virtual ids, as a scheduler hands them out over several
pools, and physical slots of one pool's storage, as kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["IdKind", "VirtualIds"]


class IdKind(Enum):
    """What the slot numbers of a request table, a batch or a pool's interface are."""

    PHYSICAL = "physical"
    VIRTUAL = "virtual"


@dataclass(frozen=True, eq=False)
class VirtualIds:
    """Virtual slot ids, int64 `[n]`. Not a tensor: no operator takes it where it wants physical slots.

    Only what translates opens it: the metadata compiler (`ForwardBatch`), `VirtualTable.assign` and
    `UnifiedPool.to_own`.
    """

    values: torch.Tensor

    def __len__(self) -> int:
        return int(self.values.shape[0])
