"""Steps that are prepared eagerly as a backend does, each compared with one that is made from nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.groups import GroupSet
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.metadata.eager import EagerPlans
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import AttentionSpec

PAGE, CONTEXT, REQUESTS = 4, 64, 8
REQUEST_TABLE = TableForm(TableKind.REQUEST_TABLE)
BLOCKS = TableForm(TableKind.BLOCK_TABLE, kernel_page=PAGE, width_multiple=2)
PAGES = TableForm(TableKind.PAGE_CSR, kernel_page=PAGE, index_slack=2)


class Steps:
    """A compiler, and steps that are prepared eagerly as a backend does."""

    def __init__(self, form: TableForm = REQUEST_TABLE, window: int | None = None) -> None:
        spec = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, sliding_window=window)
        pool = MHAPool([spec], num_slots=REQUESTS * CONTEXT, page_size=PAGE, kv_dtype=torch.float32,
                       dtype=torch.float32)  # fmt: skip
        self.table = RequestTable(max_requests=REQUESTS, max_context=CONTEXT)
        slots = torch.arange(REQUESTS * CONTEXT, dtype=torch.int32) + PAGE
        self.table.req_to_token[:REQUESTS] = slots.view(REQUESTS, CONTEXT)
        self.compiler = MetadataCompiler(GroupSet.from_specs([spec]), form, pool, self.table, owner=1)
        self.compiler.checks = "full"
        self.eager = EagerPlans(self.compiler)
        self.serves: Callable[[Plan, ForwardBatch], bool] = lambda plan, batch: True
        self.checked: list[ForwardBatch] = []

    def batch(self, *lens: int, first: int = 0, **options: Any) -> ForwardBatch:
        rows = [(first + i) % REQUESTS for i in range(len(lens))]
        loc = [int(self.table.req_to_token[row, n - 1]) for row, n in zip(rows, lens, strict=True)]
        return ForwardBatch.decode(rows, list(lens), loc, **options)

    def plan(self, batch: ForwardBatch) -> Plan:
        """Prepared, and equal in every value to a plan that is made from nothing."""
        plan = self.eager.renewed(batch, self.checked.append, self.serves)
        if plan is None:
            plan = self.eager.kept(self.compiler.prepare(batch))
        self.compiler.fill(plan)
        self.compiler.check(plan)
        same(plan, batch, self)
        return plan


def values(plan: Plan) -> dict[str, Any]:
    """All that layers and kernels read."""
    table = next(iter(plan.tables.values()))
    host = table.host
    found = {
        "key": plan.key, "max_q_len": plan.max_q_len, "max_kv_len": plan.max_kv_len,
        "host": (plan.host_seq_lens, plan.host_extend_lens),
        "host table": None if host is None else (host.indptr.tolist(), host.kv_lens.tolist()),
        "strategy": plan.strategy, "mask": plan.mask_mode, "loc": plan.listed_loc,
    }  # fmt: skip
    for name in ("req_pool_indices", "seq_lens", "prefix_lens", "extend_lens", "query_offsets", "positions"):
        found[name] = getattr(plan, name)
    for name in ("kv_start", "kv_lens", "block_table", "indptr", "indices", "last_page_len"):
        found[name] = getattr(table, name)
    found |= {str(space): loc for space, loc in plan.write_locs.items()}
    return {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def same(plan: Plan, batch: ForwardBatch, steps: Steps) -> None:
    fresh = steps.compiler.prepare(batch)
    steps.compiler.fill(fresh)
    assert plan.batch is batch
    assert values(plan) == values(fresh)
