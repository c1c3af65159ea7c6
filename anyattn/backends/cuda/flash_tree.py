"""Explicit masks on FlashAttention, which has none: each query as a request of its own over the keys it sees.

Softmax doesn't care for order, so a row of the mask is a table of single slots (a page-1 view of the pool). A
tree of drafts needs that for its own tokens alone: all of them see the prefix, which is read once through the
group's table, and the two halves merge by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anyattn.core.call import AttentionCall
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.masks import TreeMaskMode
from anyattn.core.plan import Plan
from anyattn.core.state import AttentionState

if TYPE_CHECKING:
    from anyattn.backends.cuda.flash_plan import GroupCall

__all__ = ["Descales", "TreeRows", "TreeTables", "run_tree"]

Descales = Callable[[AttentionCall, int], dict[str, torch.Tensor]]
"""`(call, requests) -> k_descale and v_descale [requests, Hkv]`, as far as there are any."""


@dataclass(eq=False)
class TreeRows:
    """A request for each query of a step, over the keys that its mask shows.

    Attributes:
        table: int32 `[T, width]`, slots; behind a row's keys slot 0. lens: int32 `[T]`, how many it sees.
        offsets: int32 `[T + 1]`: one query each.
        drafts_only: it lists the step's own tokens; the prefix is seen by all.
    """

    table: torch.Tensor
    lens: torch.Tensor
    offsets: torch.Tensor
    drafts_only: bool


class TreeTables:
    """Makes the rows of a step, in memory of fixed address where graphs are used."""

    def __init__(self, table: RequestTable) -> None:
        self._source = table
        self._held: dict[tuple[int, int, bool], TreeRows] = {}

    def prepare(self, plan: Plan, longest_query: int) -> TreeRows:
        """Host half: storage by shape and bounds."""
        drafts_only, stable = plan.mask_mode is TreeMaskMode.QLEN_ONLY, plan.stable
        longest = self._source.max_context if stable else max(1, plan.max_kv_len)
        width = longest_query if drafts_only else longest
        key = (plan.key.num_tokens, width, drafts_only)
        rows = self._held.get(key) if stable else None
        if rows is None:
            rows = _storage(*key, plan.seq_lens.device)
            if stable:
                self._held[key] = rows
        return rows

    def fill(self, plan: Plan, rows: TreeRows) -> None:
        """Device half: static shapes, no host sync."""
        assert plan.mask_cells is not None
        assert plan.mask_indptr is not None
        tokens, width = rows.table.shape
        index = torch.arange(tokens, device=rows.table.device)
        request = torch.searchsorted(plan.query_offsets[1:], index, right=True)
        live = request < plan.key.num_requests
        request = request.clamp_max(plan.key.num_requests - 1)
        first = plan.prefix_lens.long()[request] if rows.drafts_only else torch.zeros_like(index)
        columns = torch.arange(width, device=index.device)[None, :]
        count = (plan.seq_lens.long()[request] - first)[:, None]
        start = plan.mask_indptr[request] + (index - plan.query_offsets[request]) * count[:, 0]
        at = (start[:, None] + columns).clamp_(0, plan.mask_cells.shape[0] - 1)
        seen = plan.mask_cells[at].to(torch.bool) & (columns < count) & live[:, None]
        source = self._source.req_to_token
        position = (first[:, None] + columns).clamp_(0, source.shape[1] - 1)
        slots = source[plan.req_pool_indices[request][:, None], position]
        _pack(slots, seen, rows)


def _storage(tokens: int, width: int, drafts_only: bool, device: torch.device) -> TreeRows:
    return TreeRows(
        torch.zeros((tokens, width), dtype=torch.int32, device=device),
        torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.arange(tokens + 1, dtype=torch.int32, device=device),
        drafts_only,
    )


def _pack(slots: torch.Tensor, seen: torch.Tensor, rows: TreeRows) -> None:
    """Seen slots to the front of each row, in order; the others land in a column that is cut off."""
    width = seen.shape[1]
    place = torch.where(seen, torch.cumsum(seen, 1) - 1, torch.full_like(seen, width, dtype=torch.int64))
    packed = torch.zeros((seen.shape[0], width + 1), dtype=torch.int32, device=seen.device)
    packed.scatter_(1, place, slots.to(torch.int32))
    rows.table.copy_(packed[:, :width])
    torch.sum(seen, 1, dtype=torch.int32, out=rows.lens)


def run_tree(
    call: AttentionCall, rows: TreeRows, planned: GroupCall, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, descales: Descales,
) -> None:  # fmt: skip
    """Write `out` and `lse` of masked queries `q [n, Hq, D]` over caches `k`, `v` in kernel pages."""
    count = q.shape[0]
    own: dict[str, Any] = {
        "table": rows.table[:count],
        "used": rows.lens[:count],
        "cu_q": rows.offsets[: count + 1],
        "max_q": 1,
    }
    k1, v1 = (cache.view(-1, 1, *cache.shape[2:]) for cache in (k, v))
    state = _part(planned, own, q, k1, v1, out, _given(call, k, descales, count))
    if rows.drafts_only:
        cached = {"used": call.plan.prefix_lens}
        given = _given(call, k, descales, call.plan.key.num_requests)
        state = _part(planned, cached, q, k, v, out, given).merge(state)
    state = state.finalise(call.layer.sinks)
    out.copy_(state.out)
    if lse is not None:
        lse.copy_(state.lse)


def _given(
    call: AttentionCall, k: torch.Tensor, descales: Descales, requests: int
) -> dict[str, torch.Tensor]:
    """Scales of 8-bit keys, one row for each request of the call that they go with."""
    return descales(call, requests) if k.itemsize == 1 else {}


def _part(
    planned: GroupCall, changed: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, given: dict[str, torch.Tensor],
) -> AttentionState:  # fmt: skip
    """The group's call without a causal rule, over other keys, as a state that merges."""
    names = planned.function.names
    arguments = {**planned.arguments, **{names[name]: value for name, value in changed.items()}}
    arguments[names["causal"]] = False
    part = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    planned.function.run(q, k, v, arguments, part, lse, given)
    return AttentionState(part, lse.masked_fill_(torch.isposinf(lse), -torch.inf))
