"""Decode steps into a plan that took one like them before: every check and the upload in one place.

What the ordinary way asks bit by bit (`MetadataCompiler.refresh`, `renew`) has the same answers for a batch
that agrees with an earlier one in all but its values. Those are looked at, and sent. Whatever isn't certainly
right is left to the ordinary way, which knows the reason. The same Python, spread over thirty functions,
costs a host whose caches are cold more than twice as much.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode
from anyattn.core.metadata.extent import mirrored
from anyattn.core.strategy import Strategy

if TYPE_CHECKING:
    from anyattn.core.metadata.pack import Pack
    from anyattn.core.metadata.upload import Uploader
    from anyattn.core.plan import Plan

__all__ = ["Again", "again_for"]

Again = Callable[["Plan", ForwardBatch], bool]
"""`again(plan, batch)`: the plan stands for `batch` now, and its vectors are on their way. False: nothing was
done.
"""


def again_for(plan: Plan, pack: Pack, uploader: Uploader, *, check: bool) -> Again | None:
    """For batches like `plan.batch`, which was just compiled into `plan` from `pack`; the same padding, too.

    None: it isn't a plain decode step, or its vectors don't lie side by side.
    """
    was, layout = plan.batch, plan.uploaded
    if was.whole is None or layout is None or was.forward_mode is not ForwardMode.DECODE:
        return None
    if plan.strategy is not Strategy.PAGED or plan.mask_mode is not None:
        return None
    size, tokens, ids, kind = len(was.whole), was.num_tokens, was.ids, type(was.host_lens)
    padded, padded_tokens = was.num_padding_requests, was.num_padding_tokens
    stores, positioned = was.out_cache_loc is not None, was.positions is not None
    right = pack.right if check else None
    exact = kind is Exact
    del was  # a plan's batch changes: this one isn't to be kept

    def again(plan: Plan, batch: ForwardBatch) -> bool:
        wide, lens = batch.whole, batch.host_lens
        if (
            wide is None
            or len(wide) != size  # with the fields that are there, the number of requests follows
            or batch.num_tokens != tokens
            or batch.forward_mode is not ForwardMode.DECODE
            or batch.num_padding_requests != padded
            or batch.num_padding_tokens != padded_tokens
            or batch.ids is not ids
            or batch.mask is not None
            or batch.encoder_lens is not None
            or batch.encoder_out_cache_loc is not None
            or (batch.out_cache_loc is not None) is not stores
            or (batch.positions is not None) is not positioned
            or type(lens) is not kind  # what a backend needs to know of them is asked of their type
            or (isinstance(lens, Exact) and lens.seq_lens is not batch.seq_lens)
            or (right is not None and not right(wide))
        ):
            return False
        if not uploader.put(layout, wide):
            uploader.send_again(layout, layout.read(batch))
        plan.retarget(batch)
        for group, table in plan.tables.items():
            table.remirror(partial(mirrored, batch, group, table.form.kernel_page) if exact else None)
        return True

    return again
