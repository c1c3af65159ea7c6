"""`torch_native`: every feature on any device, at float32 accumulation. The floor and the first judge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from anyattn.backends.reference.attend import attend, visible
from anyattn.backends.reference.invariant import attend_invariant
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend
from anyattn.core.groups import TableGroup
from anyattn.core.kv.scales import dequantize
from anyattn.core.masks import TreeMaskMode
from anyattn.core.plan import Plan, Table
from anyattn.core.spec import AttentionKind
from anyattn.core.traits import Determinism, SharedReadEnds, Traits

__all__ = ["TorchNative"]


@dataclass(frozen=True)
class _Rows:
    """Where one request's queries and keys stand in the flat tensors."""

    index: int
    q: slice
    kv: slice
    start: int  # position of the first listed key
    prefix: int


@dataclass(eq=False)
class _Steps:
    """`Plan.private`: row ranges per table, and the masks that layers of a group share."""

    rows: dict[Table | None, list[_Rows]]
    masks: dict[tuple[TableGroup, int], torch.Tensor | None] = field(default_factory=dict)


class TorchNative(AttentionBackend):
    """Gathers each request's KV through the table and attends in float32.

    Reads a TOKEN_CSR table and exact host lengths. Decode and extend differ only in their lengths.
    Asked for batch invariance, it attends in tiles of fixed place and shape (`invariant`), which is slower.
    """

    def traits(self, mode: ForwardMode) -> Traits:
        """Tree masks are read in either form; tables and lengths are copied while planning."""
        declared = super().traits(mode)
        return replace(
            declared,
            determinism=min(declared.determinism, max(self.config.deterministic, Determinism.RUN_TO_RUN)),
            tree_mask=TreeMaskMode.QLEN_ONLY,
            shared_read_ends=SharedReadEnds.IN_REPLAY,
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Row ranges of every request and table, once a step."""
        tables: list[Table | None] = [None, *plan.tables.values()]
        plan.private = _Steps({table: _row_ranges(plan, table) for table in tables})

    def forward_decode(self, call: AttentionCall) -> None:
        """As `forward_extend`, one query a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Each request alone, in order."""
        spec = call.layer.spec
        k, v, appended = self._keys(call)
        q = call.q.float()
        sinks = None if call.layer.sinks is None else call.layer.sinks.float()
        for rows in call.plan.private.rows[call.table]:
            if rows.q.start == rows.q.stop:
                continue
            keys, values = k[rows.kv], v[rows.kv]
            if appended is not None:
                cached = keys.shape[0] - (rows.q.stop - rows.q.start)
                keys = torch.cat((keys[:cached], appended[0][rows.q]))
                values = torch.cat((values[:cached], appended[1][rows.q]))
            seen = self._visible(call, rows, keys.shape[0])
            lse = None if call.lse is None else call.lse[rows.q]
            if self.config.deterministic is Determinism.BATCH_INVARIANT:
                attend_invariant(
                    q[rows.q], keys, values, spec, seen, call.out[rows.q], lse, sinks,
                    first_query=rows.prefix, first_key=rows.start,
                )  # fmt: skip
                continue
            attend(
                q[rows.q], keys, values, spec, seen, call.out[rows.q], lse, sinks,
                empty_rows=call.plan.mask_cells is not None,
            )  # fmt: skip

    def _keys(
        self, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """`(k, v)` in float32 that `_Rows.kv` points into; and this step's own, where they aren't stored."""
        own = None
        if not call.stored:
            assert call.k is not None
            assert call.v is not None
            own = (call.k.float(), call.v.float())
            if call.table is None or call.layer.spec.kind is AttentionKind.CROSS:
                return (*own, None)
        assert call.table is not None
        _, indices = call.table.csr
        k, v = self.pool.gather(call.layer.layer_id, indices)
        k_scale, v_scale = self.pool.scales(call.layer.layer_id)
        return dequantize(k, k_scale), dequantize(v, v_scale), own

    def _visible(self, call: AttentionCall, rows: _Rows, num_keys: int) -> torch.Tensor | None:
        """Mask of one request, in positions, built once a step; None = every query sees every key."""
        spec, plan = call.layer.spec, call.plan
        if spec.kind is AttentionKind.CROSS:
            return None
        if rows.q.stop - rows.q.start == 1 and plan.mask_cells is None:
            return None  # the table is trimmed to exactly the window
        masks: dict[tuple[TableGroup, int], torch.Tensor | None] = plan.private.masks
        key = (call.group.table, rows.index)
        if key not in masks:
            masks[key] = _mask(call, rows, num_keys)
        return masks[key]


def _mask(call: AttentionCall, rows: _Rows, num_keys: int) -> torch.Tensor | None:
    spec, plan = replace(call.layer.spec, kind=call.kind), call.plan
    q_pos = plan.positions[rows.q]
    # Tree siblings share a position: new keys stand where their queries stand, not at their column.
    k_pos = q_pos
    if call.table is not None:
        k_pos = torch.cat((torch.arange(rows.start, rows.prefix, device=q_pos.device), q_pos))
    assert k_pos.shape[0] == num_keys
    mask = None
    if plan.mask_cells is not None:
        assert plan.host_mask_indptr is not None
        first, drafts = plan.host_mask_indptr[rows.index], q_pos.shape[0]
        tree = plan.mask_mode is TreeMaskMode.QLEN_ONLY
        columns = drafts if tree else rows.prefix + drafts
        cells = plan.mask_cells[first : first + drafts * columns].view(drafts, columns).bool()
        mask = F.pad(cells, (rows.prefix - rows.start, 0), value=True) if tree else cells[:, rows.start :]
    return visible(spec, q_pos, k_pos, mask)


def _row_ranges(plan: Plan, table: Table | None) -> list[_Rows]:
    assert plan.host_seq_lens is not None
    assert plan.host_extend_lens is not None
    indptr = None
    starts = [0] * len(plan.host_seq_lens)
    if table is not None:
        assert table.host is not None
        indptr = table.host.indptr.tolist()
        lens = table.host.kv_lens.tolist()
        starts = [s - n for s, n in zip(plan.host_seq_lens, lens, strict=True)]
    rows, offset = [], 0
    real = len(plan.host_seq_lens) - plan.batch.num_padding_requests
    for i, (seq, ext) in enumerate(zip(plan.host_seq_lens, plan.host_extend_lens, strict=True)):
        q = slice(offset, offset + ext)
        offset += ext
        if i >= real:
            break
        kv = q if indptr is None else slice(indptr[i], indptr[i + 1])
        rows.append(_Rows(i, q, kv, starts[i], seq - ext))
    return rows
