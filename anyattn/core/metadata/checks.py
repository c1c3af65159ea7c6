"""What is verified before a step runs: the host's knowledge always, device values with checks=full."""

from __future__ import annotations

import torch

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.masks import VerifyMask
from anyattn.core.metadata.slots import RowCheck, SlotCheck
from anyattn.core.plan import Plan
from anyattn.errors import BatchError, GraphError

__all__ = ["check_host", "check_same_shape", "check_values", "same_shape"]


def check_host(batch: ForwardBatch, table: RequestTable, rows: RowCheck, slots: SlotCheck) -> None:
    """Everything that is known without reading the device.

    Raises:
        BatchError: rows or lengths beyond the table, slots in page 0 or beyond the pool, a slot written
            twice, encoder lengths beyond the encoder table.
    """
    named, padding = batch.req_pool_indices, batch.num_padding_requests
    real = named.shape[0] - padding
    if named.is_cpu:
        mine = named[:real] if padding else named
        if not rows.inside(mine):
            _within("req_pool_indices", mine, 0, table.max_requests - 1)
    exact, mask = batch.exact, batch.mask
    if isinstance(mask, VerifyMask):
        _check_verify_mask(batch, mask)
    if exact is not None:
        if exact.longest > table.max_context:  # none is negative: the batch saw to it
            _within("seq_lens", exact.seq_lens, 0, table.max_context)
        if mask is not None:
            _check_mask(batch, exact)
    if batch.encoder_lens is not None and batch.encoder_lens.is_cpu:
        _within("encoder_lens", batch.encoder_lens[:real], 0, table.max_encoder)
    loc = batch.out_cache_loc
    if loc is not None and loc.is_cpu:
        padding = batch.num_padding_tokens
        slots.check("out_cache_loc", loc[: batch.num_tokens - padding] if padding else loc)
    enc = batch.encoder_out_cache_loc
    if enc is not None and enc.is_cpu:
        slots.check("encoder_out_cache_loc", enc)
        _check_encoder_slots(batch, enc)


def _within(name: str, values: torch.Tensor, low: int, high: int) -> None:
    if not values.numel():
        return
    lowest, highest = torch.aminmax(values)
    if not (low <= int(lowest) and int(highest) <= high):
        raise BatchError(
            f"{name} out of range of the request table",
            asked=values.tolist(),
            allowed=f"{low}..{high}",
            hint="make RequestTable larger, or split or refuse the request",
        )


def _check_encoder_slots(batch: ForwardBatch, slots: torch.Tensor) -> None:
    """No more slots than encoder tokens, and none that the step's own tokens go to as well."""
    lens, loc = batch.encoder_lens, batch.out_cache_loc
    most = int(lens.sum()) if lens is not None and lens.is_cpu else None
    if lens is None or (most is not None and slots.shape[0] > most):
        raise BatchError(
            "encoder_out_cache_loc has more slots than the step has encoder tokens",
            asked=slots.shape[0],
            allowed=0 if lens is None else f"<= {most}",
            hint="give encoder_lens, and slots for the encoder tokens that are stored in this step",
        )
    if loc is not None and loc.is_cpu:
        shared = slots[torch.isin(slots, loc)]
        if shared.numel():
            raise BatchError(
                "encoder and decoder tokens are written to the same slot, twice",
                asked=int(shared[0]),
                allowed="disjoint out_cache_loc and encoder_out_cache_loc",
                hint="allocate pages of their own for encoder tokens",
            )


def _check_mask(batch: ForwardBatch, exact: Exact) -> None:
    """The mask holds extend_len x seq_len cells per request, rows first."""
    mask = batch.mask
    if mask is None or isinstance(mask, VerifyMask) or not mask.indptr.is_cpu:
        return
    sizes = (exact.extend_lens * exact.seq_lens).cumsum(0).tolist()
    given = mask.indptr.tolist()
    if given != [0, *sizes] or mask.cells.numel() != given[-1]:
        raise BatchError(
            "the explicit mask doesn't fit the lengths",
            asked=f"indptr {given}, {mask.cells.numel()} cells",
            allowed=f"indptr {[0, *sizes]}: extend_len x seq_len cells per request",
            hint="ExplicitMask.from_matrices with one [extend_len, seq_len] matrix per request",
        )


def _check_verify_mask(batch: ForwardBatch, mask: VerifyMask) -> None:
    """The buffer has room for the requests, and for their lengths where the host knows them."""
    drafts = seq = 0
    if batch.exact is not None and batch.batch_size:
        drafts, seq = int(batch.exact.extend_lens.max()), int(batch.exact.seq_lens.max())
    elif isinstance(batch.host_lens, UpperBound):
        drafts, seq = batch.host_lens.max_extend_len, batch.host_lens.max_seq_len
    if not mask.fits(batch.batch_size, drafts, seq):
        raise BatchError(
            "the verify mask doesn't fit the step (requests, draft tokens, context)",
            asked=(batch.batch_size, drafts, seq),
            allowed=(mask.max_requests, mask.draft_tokens, mask.max_context or "any"),
            hint="VerifyMask.allocate for the largest step",
        )


def same_shape(plan: Plan, batch: ForwardBatch) -> bool:
    """`batch` has the mode, the numbers of requests and tokens, and the fields that `plan` was made for."""
    _, _, mode, requests, tokens = plan.key
    was = plan.batch
    return (
        batch.forward_mode is mode
        and batch.req_pool_indices.shape[0] == requests
        and batch.num_tokens == tokens
        and (batch.out_cache_loc is None) is (was.out_cache_loc is None)
        and (batch.positions is None) is (was.positions is None)
        and (batch.encoder_lens is None) is (was.encoder_lens is None)
        and (batch.encoder_out_cache_loc is None) is (was.encoder_out_cache_loc is None)
        and type(batch.mask) is type(was.mask)
    )


def check_same_shape(plan: Plan, batch: ForwardBatch) -> None:
    """`batch` can take the place of the one that `plan` was captured with.

    Raises:
        GraphError: another mode, number of requests or tokens, or other optional fields.
    """
    key, was = plan.key, plan.batch
    if same_shape(plan, batch):
        return
    for name, asked, allowed in (
        ("mode", batch.forward_mode.value, key.mode.value),
        ("requests", batch.batch_size, key.num_requests),
        ("tokens", batch.num_tokens, key.num_tokens),
        *((name, _given(getattr(batch, name)), _given(getattr(was, name))) for name in _OPTIONAL),
    ):
        if asked != allowed:
            raise GraphError(
                f"this batch isn't of the shape that was captured: {name}",
                asked=asked,
                allowed=allowed,
                hint="pad the batch to the captured bucket (GraphRunner does), or run it eagerly",
            )


_OPTIONAL = ("out_cache_loc", "positions", "encoder_lens", "encoder_out_cache_loc", "mask")


def _given(value: object) -> str:
    return "none" if value is None else type(value).__name__


def check_values(plan: Plan, table: RequestTable, page_size: int, total_slots: int) -> None:
    """Reads device values (checks=full): lengths are within the bound that tables have room for, every live
    table cell is a real slot, new tokens are in the table.

    Raises:
        BatchError: a length beyond the bound; a request whose row lists page 0 or slots beyond the pool;
            `out_cache_loc` that disagrees with the table.
    """
    batch = plan.batch
    real = batch.batch_size - batch.num_padding_requests
    if batch.forward_mode is ForwardMode.IDLE or batch.out_cache_loc is None or real == 0:
        return
    rows = plan.req_pool_indices[:real].cpu()
    source = table.req_to_token[plan.req_pool_indices[:real]].cpu().long()
    seq, prefix = plan.seq_lens[:real].cpu(), plan.prefix_lens[:real].cpu()
    if int(seq.max()) > plan.max_kv_len:
        raise BatchError(
            "seq_lens beyond what host_lens said when the step was planned",
            asked=int(seq.max()),
            allowed=f"<= {plan.max_kv_len}",
            hint="give an UpperBound that holds, and build a batch anew in place of writing to its tensors",
        )
    window = _common_window(plan)
    column = torch.arange(source.shape[1], device="cpu")[None, :]
    first = torch.zeros_like(prefix) if window is None else (prefix - window + 1).clamp_min(0)
    live = (column < seq[:, None]) & (column >= first[:, None])
    bad = live & ((source < page_size) | (source >= total_slots))
    if bool(bad.any()):
        row, col = (int(x) for x in bad.nonzero()[0])
        raise BatchError(
            f"row {int(rows[row])} of req_to_token has no real slot at position {col}",
            asked=int(source[row, col]),
            allowed=f"{page_size}..{total_slots - 1}",
            hint="write the slots of all seq_lens tokens into the table before planning",
        )
    new = ((column >= prefix[:, None]) & (column < seq[:, None])).nonzero()
    listed = source[new[:, 0], new[:, 1]]
    given = batch.out_cache_loc[: listed.shape[0]].cpu()
    if not torch.equal(listed, given):
        at = int((listed != given).nonzero()[0])
        raise BatchError(
            f"out_cache_loc disagrees with req_to_token at token {at}",
            asked=int(given[at]),
            allowed=int(listed[at]),
            hint="new tokens go to the slots that the table lists for them",
        )


def _common_window(plan: Plan) -> int | None:
    """The widest window of all groups, None if some group reads everything."""
    windows = [g.window for g in plan.tables]
    return None if not windows or None in windows else max(w for w in windows if w is not None)
