"""Vectors of a prefill step at fixed addresses, for graphs of what stands between its attention layers.

Attention itself runs eagerly on a plan of its own, so these plans have no tables.
"""

from __future__ import annotations

from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import GroupSet
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, TableForm
from anyattn.core.spec import Limits

__all__ = ["SegmentMetadata"]


class SegmentMetadata:
    """Makes and refreshes such plans, in buffers that no full graph uses."""

    def __init__(
        self, limits: Limits, form: TableForm, pool: KVPool, table: RequestTable, owner: int
    ) -> None:
        """Allocates nothing before the first capture."""
        self._compiler = MetadataCompiler(GroupSet((), {}), form, pool, table, owner)
        self._buffers = StepBuffers(limits, form, pool.device)

    def capture(self, batch: ForwardBatch) -> Plan:
        """A plan whose addresses segments may record. Raises `BatchError` beyond the limits."""
        plan = self._compiler.prepare(_without_positions(batch), self._buffers, in_capture=True)
        self._compiler.fill(plan)
        return plan

    def refresh(self, plan: Plan, batch: ForwardBatch) -> None:
        """Another step of the same shape at the addresses of `plan`. Raises `BatchError`, `GraphError`."""
        self._compiler.refresh(plan, _without_positions(batch))
        self._compiler.fill(plan)
        if batch.positions is not None:
            plan.positions.copy_(batch.positions)


def _without_positions(batch: ForwardBatch) -> ForwardBatch:
    """Whether a step brings positions differs between steps; where they lie may not."""
    return batch if batch.positions is None else batch.view(positions=None)
