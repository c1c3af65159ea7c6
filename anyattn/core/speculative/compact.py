"""After verification: the KV of accepted nodes moves to where their tokens stand in the sequence.

The nodes of a tree occupy columns `prefix .. prefix + d - 1` of their request, one slot each. Once a path is
accepted, its t-th node is token `prefix + t`. The data is moved rather than the table rewritten: position p
then stays in slot `page[p // P] * P + p % P`, which every page-granular kernel, prefix sharing and the
allocator rely on. At most `depth` tokens a request are moved, and none on a chain.
"""

from __future__ import annotations

import torch

from anyattn.core.kv.request_table import RequestTable

__all__ = ["moves"]


def moves(
    table: RequestTable,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(source, target)` slots int64 `[B * d]` for `KVPool.move`: static shapes, no host sync.

    Args:
        req_pool_indices, prefix_lens: `[B]` on the table's device.
        path: int64 `[B, d]`, accepted nodes in order; counts: `[B]`, how many of them are.
            (`accept_on_device` gives both.)

    Entries behind the accepted ones move slot 0, which belongs to nobody, to itself.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    rows = table.req_to_token[req_pool_indices]
    start = prefix_lens.long()[:, None]
    last = rows.shape[1] - 1
    source = rows.gather(1, (start + path).clamp_max(last))
    target = rows.gather(1, (start + steps).clamp_max(last))
    live = steps < counts[:, None]
    return torch.where(live, source, 0).flatten().long(), torch.where(live, target, 0).flatten().long()
