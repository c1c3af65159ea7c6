"""What a backend is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import CapabilityRow, Phase
from anyattn.core.facts import LibraryFacts
from anyattn.core.groups import GroupSet
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.plan import TableForm
from anyattn.core.spec import Limits
from anyattn.core.traits import Determinism

__all__ = ["BackendConfig"]

_PHASES = {
    ForwardMode.DECODE: Phase.DECODE,
    ForwardMode.TARGET_VERIFY: Phase.VERIFY,
    ForwardMode.DRAFT_EXTEND: Phase.DRAFT,
}


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """What a backend is built from: the model's groups, its KV, and the capability rows that passed.

    `provider`: the distribution that ships the row's kernels on this host, of several that could; None
    where the row needs no library.
    """

    name: str
    groups: GroupSet
    pool: KVPool
    table: RequestTable
    limits: Limits
    form: TableForm
    row: CapabilityRow
    rows: Mapping[Phase, CapabilityRow] = field(default_factory=dict)
    dtype: torch.dtype
    deterministic: Determinism = Determinism.NONE
    provider: LibraryFacts | None = None

    def row_for(self, mode: ForwardMode) -> CapabilityRow:
        """The row that passed for the phase of `mode`; `row` where there is none of its own."""
        return self.rows.get(_PHASES.get(mode, Phase.PREFILL), self.row)
