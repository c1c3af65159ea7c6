"""`DraftInfo`: multi-step drafting with top-k branches, each branch with a KV table of its own.

In draft step i (0-based) branch j of a request reads the request's prefix and its own chain of i + 1 tokens,
the current one included. Each branch is therefore a row of a request table that belongs to the draft, and a
draft step is an ordinary DECODE of `B * k` rows; backends need nothing new. A branch's chain lies in slots of
any page, so the table is *token granular*: with pages of more than one token build the backend with
`create_draft_backend(decision, pool, info.table, branches=k)`, which reads slot by slot.
"""

from __future__ import annotations

import torch

from anyattn.core.batch import Exact, ForwardBatch, UpperBound
from anyattn.core.batch_checks import IntLike, as_index
from anyattn.core.kv.request_table import RequestTable
from anyattn.errors import BatchError, ConfigError

__all__ = ["DraftInfo"]


class DraftInfo:
    """Branch tables of up to `max_requests` requests with `top_k` branches of `max_steps` drafts.

    Row `r * top_k + j` of `table` is branch j of the r-th request of the batch. Everything after `begin`
    happens on the device: no step waits for the host.

    Attributes:
        table: the branches' tables, token granular.
        parents: int64 `[B, 1 + steps * k]`, the tree drafted so far: node 0 is the root (the token that the
            first drafts follow), node `1 + i * k + j` the token of branch j in step i.

    Raises:
        ConfigError: sizes below 1.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        top_k: int,
        max_steps: int,
        max_context: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(max_requests, top_k, max_steps, max_context) < 1:
            raise ConfigError(
                "sizes of a draft (max_requests, top_k, max_steps, max_context)",
                asked=(max_requests, top_k, max_steps, max_context),
                allowed=">= 1 each",
            )
        self.max_requests, self.top_k, self.max_steps = max_requests, top_k, max_steps
        self.table = RequestTable(max_requests=max_requests * top_k, max_context=max_context, device=device)
        self.parents = torch.empty(0, 0, dtype=torch.int64)
        self._seq = torch.empty(0, dtype=torch.int64)
        self._host_seq: torch.Tensor | None = None
        self._chain = self._nodes = torch.empty(0)

    @property
    def steps(self) -> int:
        """Draft steps since `begin`."""
        return (self.parents.shape[1] - 1) // self.top_k

    def begin(self, source: RequestTable, req_pool_indices: IntLike, seq_lens: IntLike) -> None:
        """Copy each request's row of `source` to its branches. `seq_lens [B]`: tokens with KV in the pool.

        Raises:
            BatchError: more requests than `max_requests`, lengths that leave no room for the drafts (where
                the host knows them), or a source that is wider than the branch tables.
        """
        rows, seq = as_index(req_pool_indices, "req_pool_indices"), as_index(seq_lens, "seq_lens")
        self._host_seq = seq if seq.device.type == "cpu" else None
        self._check_room(rows.shape[0], source)
        device = self.table.device
        self._seq = seq.to(device, non_blocking=True)
        branches = rows.shape[0] * self.top_k
        lists = source.req_to_token[rows.to(device, non_blocking=True)].repeat_interleave(self.top_k, 0)
        self.table.req_to_token[:branches, : source.max_context] = lists
        shape = (rows.shape[0], self.top_k, self.max_steps)
        self._chain = torch.zeros(shape, dtype=torch.int64, device=device)
        self._nodes = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        self.parents = torch.full((rows.shape[0], 1), -1, dtype=torch.int64, device=device)

    def step(self, slots: torch.Tensor, parents: torch.Tensor | None = None) -> ForwardBatch:
        """The next draft step, as a DECODE of B * k rows, branches of a request one after another.

        Args:
            slots: int64 `[B, k]`, where the KV of each branch's token goes: free slots of any page.
            parents: `[B, k]`, which branch of the step before each branch continues; None in the first step,
                and where each continues itself.

        Raises:
            BatchError: more steps than `max_steps`, other shapes, a branch that doesn't exist (where the
                host can see it).
        """
        index, shape = self.steps, (self.parents.shape[0], self.top_k)
        self._check_step(index, slots, parents)
        device = self.table.device
        slots = slots.to(device, torch.int64, non_blocking=True)
        if parents is None:
            parents = torch.arange(self.top_k, device=device).expand(shape)
        parents = parents.to(device, torch.int64, non_blocking=True)
        above = self._nodes.gather(1, parents) if index else torch.zeros_like(parents)
        self.parents = torch.cat((self.parents, above), dim=1)
        self._nodes = (1 + index * self.top_k + torch.arange(self.top_k, device=device)).expand(shape)
        if index:
            self._chain = self._chain.gather(1, parents[:, :, None].expand_as(self._chain))
        self._chain[:, :, index] = slots
        branches = shape[0] * self.top_k
        start = self._seq.repeat_interleave(self.top_k)
        columns = start[:, None] + torch.arange(index + 1, device=device)
        columns.clamp_(max=self.table.max_context - 1)
        chain = self._chain.view(branches, -1)[:, : index + 1].to(torch.int32)
        self.table.req_to_token[:branches].scatter_(1, columns, chain)
        return ForwardBatch.decode(
            torch.arange(branches, device=device),
            start + (index + 1),
            slots.flatten(),
            host_lens=self._host_lens(index),
        )

    def _host_lens(self, index: int) -> Exact | UpperBound:
        """Exact where `begin` was given lengths on the host, else a bound; never a copy from the device."""
        if self._host_seq is None:
            return UpperBound(self.table.max_context, 1)
        seq = self._host_seq.repeat_interleave(self.top_k) + (index + 1)
        return Exact(seq, torch.ones_like(seq))

    def _check_room(self, requests: int, source: RequestTable) -> None:
        seq = self._host_seq
        need = 0 if seq is None or not seq.numel() else int(seq.max()) + self.max_steps
        if requests > self.max_requests or need > self.table.max_context:
            raise BatchError(
                "a draft that its tables have no room for (requests, KV tokens with all drafts)",
                asked=(requests, need),
                allowed=(self.max_requests, self.table.max_context),
                hint="make DraftInfo larger, or draft fewer steps",
            )
        if source.max_context > self.table.max_context:
            raise BatchError(
                "branch tables narrower than the request table",
                asked=self.table.max_context,
                allowed=f">= {source.max_context}",
                hint="DraftInfo(max_context=table.max_context + max_steps)",
            )

    def _check_step(self, index: int, slots: torch.Tensor, parents: torch.Tensor | None) -> None:
        if self.parents.shape[0] == 0 or index >= self.max_steps:
            raise BatchError(
                "more draft steps than planned for, or none begun",
                asked=index + 1,
                allowed=f"1..{self.max_steps} after begin()",
                hint="DraftInfo(max_steps=...)",
            )
        shape = (self.parents.shape[0], self.top_k)
        for name, value in (("slots", slots), ("parents", parents)):
            if value is not None and tuple(value.shape) != shape:
                raise BatchError(
                    f"{name} of a draft step",
                    asked=tuple(value.shape),
                    allowed=shape,
                    hint="one entry per request and branch",
                )
        seen = parents is not None and parents.device.type == "cpu" and parents.numel()
        if parents is not None and seen and not 0 <= int(parents.min()) <= int(parents.max()) < self.top_k:
            raise BatchError(
                "a draft that continues a branch that doesn't exist",
                asked=parents.tolist(),
                allowed=f"0..{self.top_k - 1}",
                hint="parents are branch numbers of the step before",
            )
