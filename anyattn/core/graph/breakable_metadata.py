"""A prefill batch at the shape that captured segments read: as many request rows as any step may have."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode
from anyattn.core.kv.request_table import RequestTable
from anyattn.errors import GraphError

__all__ = ["segment_batch"]


def segment_batch(
    batch: ForwardBatch | None, num_requests: int, num_tokens: int, table: RequestTable
) -> ForwardBatch:
    """`batch` (None: nobody) with empty requests and tokens behind its own, as an EXTEND without a mask.

    Padded requests are the table's padding row with length 0; padded tokens go to slot 0.

    Raises:
        GraphError: more requests than the limits, or a step that stores nothing.
    """
    if batch is None:
        none = torch.zeros(0, dtype=torch.int64)
        batch = ForwardBatch(ForwardMode.EXTEND, none, none, none, none, 0, host_lens=Exact(none, none))
    if batch.batch_size > num_requests or batch.out_cache_loc is None:
        raise GraphError(
            "segments that read metadata have a fixed number of request rows, and slots to write",
            asked=f"{batch.batch_size} requests, "
            + ("no out_cache_loc" if batch.out_cache_loc is None else "out_cache_loc"),
            allowed=f"<= {num_requests} requests (Limits.max_requests), out_cache_loc",
            hint="raise Limits, split the batch, or run this step eagerly",
        )

    def grown(value: torch.Tensor, rows: int, fill: int = 0) -> torch.Tensor:
        return pad(value, (0, rows - value.shape[0]), value=fill)

    exact = batch.exact
    if exact is not None:
        exact = Exact(grown(exact.seq_lens, num_requests), grown(exact.extend_lens, num_requests))
    return batch.view(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=grown(batch.req_pool_indices, num_requests, table.padding_row),
        seq_lens=grown(batch.seq_lens, num_requests),
        extend_seq_lens=grown(batch.extend_seq_lens, num_requests),
        out_cache_loc=grown(batch.out_cache_loc, num_tokens),
        positions=None if batch.positions is None else grown(batch.positions, num_tokens),
        num_tokens=num_tokens,
        host_lens=exact or batch.host_lens,
        num_padding_requests=batch.num_padding_requests + num_requests - batch.batch_size,
        num_padding_tokens=batch.num_padding_tokens + num_tokens - batch.num_tokens,
        num_decode=0,
        mask=None,
        encoder_lens=None,
        encoder_out_cache_loc=None,
    )
