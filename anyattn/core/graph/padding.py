"""A batch grown to its bucket: what padded requests carry, field by field, without allocating.

req_pool_indices   the table's padding row, all zero
seq_lens           the backend's fill length (host and device)
extend_seq_lens    the graph's tokens per request
out_cache_loc      slot 0, in the sink page
positions          0
encoder_lens       0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, HostLengths
from anyattn.core.graph.buckets import GraphKey
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.plan import Plan

__all__ = ["Padder"]


@dataclass(frozen=True)
class _Field:
    """A field of the batch: its name there and in the plan, rows it has, and the padding rule."""

    name: str
    per_token: bool
    fill: int


class _Whole:
    """`ForwardBatch.whole` of padded decode steps with the same fields: what they are, as a tensor and as
    numpy has them, a row a field.
    """

    def __init__(self, fields: list[_Field], requests: int) -> None:
        fills = [field.fill for field in fields for _ in range(requests)]
        vectors = torch.tensor(fills, dtype=torch.int64, device="cpu").view(len(fields), requests)
        self.views = {field.name: row for field, row in zip(fields, vectors, strict=True)}
        self.wide = vectors.view(-1).numpy()
        self.rows = self.wide.reshape(len(fields), requests)
        self.fills: Any = self.rows[:, :1].copy()
        self.used = 0
        """Columns that don't hold the padding."""

    def fill(self, wide: Any, requests: int) -> None:
        """The vectors of a batch of so many requests, and padding behind them."""
        rows = self.rows
        rows[:, :requests] = wide.reshape(-1, requests)
        if requests < self.used:
            rows[:, requests : self.used] = self.fills
        self.used = requests


class Padder:
    """Pads batches to one graph's bucket, in host vectors of its own or in the captured plan's storage.

    The padded batch is valid until the next one is made.
    """

    def __init__(self, key: GraphKey, table: RequestTable, fill_len: int) -> None:
        """`fill_len`: `get_cuda_graph_seq_len_fill_value` of the mode."""
        self.key = key
        self._fields = (
            _Field("req_pool_indices", False, table.padding_row),
            _Field("seq_lens", False, fill_len),
            _Field("extend_seq_lens", False, key.tokens_per_request),
            _Field("out_cache_loc", True, 0),
            _Field("positions", True, 0),
            _Field("encoder_lens", False, 0),
        )
        self._host = {f.name: self._filled(f) for f in self._fields}
        self._exact = {f.name: self._filled(f) for f in self._fields[1:3]}
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._wholes: dict[tuple[bool, bool], _Whole] = {}

    def _filled(self, field: _Field) -> torch.Tensor:
        rows = self.key.num_tokens if field.per_token else self.key.num_requests
        with torch.inference_mode(False):  # written to inside of it and outside
            return torch.full((rows,), field.fill, dtype=torch.int64, device="cpu")

    def empty(self, example: ForwardBatch) -> ForwardBatch:
        """A batch of padding alone, with the optional fields of `example`, known exactly on the host."""
        given = {f.name: self._host[f.name] for f in self._fields if getattr(example, f.name) is not None}
        exact = Exact(self._host["seq_lens"], self._host["extend_seq_lens"])
        return self._batch(example, given, exact, self.key.num_requests)

    def pad(self, batch: ForwardBatch, captured: Plan) -> ForwardBatch:
        """`batch` with padded requests behind its own, some of which may be padding already. Fields on the
        device are written where `captured` has them.
        """
        if batch.batch_size == self.key.num_requests and batch.num_tokens == self.key.num_tokens:
            return batch.as_captured(self.key.mode)
        plain = batch.forward_mode is ForwardMode.DECODE and batch.num_tokens == batch.batch_size
        if plain and batch.whole is not None and batch.encoder_lens is None:
            return self._pad_whole(batch)
        given: dict[str, torch.Tensor] = {}
        for field in self._fields:
            value: torch.Tensor | None = getattr(batch, field.name)
            if value is None:
                continue
            target = self._host[field.name] if value.is_cpu else _stored(captured, field.name)
            given[field.name] = self._grown(target, value, field.fill)
        exact = batch.exact
        if exact is not None:
            exact = self._lens(batch, exact, given)
        return self._batch(batch, given, exact, self.key.num_requests - batch.batch_size)

    def _pad_whole(self, batch: ForwardBatch) -> ForwardBatch:
        """A decode step all of whose vectors are on the host: they are grown together."""
        requests, lens, bucket = batch.req_pool_indices.shape[0], batch.host_lens, self.key.num_requests
        given = batch.out_cache_loc is not None, batch.positions is not None
        whole = self._wholes.get(given)
        if whole is None:
            fields = [f for f in self._fields if getattr(batch, f.name) is not None]
            whole = self._wholes[given] = _Whole(fields, bucket)
        whole.fill(batch.whole, requests)
        views, added = whole.views, bucket - requests
        if isinstance(lens, Exact):
            lens = self._lens(batch, lens, views)
        made = self._batch(batch, views, lens, added)
        vars(made)["whole"] = whole.wide  # which the views are of
        return made

    def _lens(self, batch: ForwardBatch, exact: Exact, given: Mapping[str, torch.Tensor]) -> Exact:
        """Lengths of the host: the batch's own, or mirrors of those on the device."""
        values = exact.seq_lens, exact.extend_lens
        pairs = zip(self._exact.items(), values, self._fields[1:3], strict=True)
        return Exact(
            *(
                given[name] if value is getattr(batch, name) else self._grown(mirror, value, field.fill)
                for (name, mirror), value, field in pairs
            )
        )

    def _grown(self, target: torch.Tensor, value: torch.Tensor, fill: int) -> torch.Tensor:
        rows = value.shape[0]
        if rows == target.shape[0]:
            target.copy_(value)
            return target
        views = self._views.get((id(target), rows))
        if views is None:
            views = self._views[id(target), rows] = target[:rows], target[rows:]
        views[0].copy_(value)
        views[1].fill_(fill)
        return target

    def _batch(
        self, batch: ForwardBatch, given: Mapping[str, torch.Tensor], lens: HostLengths, added: int
    ) -> ForwardBatch:
        return batch.view(
            **given,
            num_tokens=self.key.num_tokens,
            host_lens=batch.host_lens if lens is None else lens,
            num_padding_requests=batch.num_padding_requests + added,
            num_padding_tokens=batch.num_padding_tokens + added * self.key.tokens_per_request,
            captured_mode=self.key.mode,
        )


def _stored(plan: Plan, name: str) -> torch.Tensor:
    """Where a captured plan keeps a field of the batch. Copying it onto itself, later, does nothing."""
    if name == "out_cache_loc":
        assert plan.listed_loc is not None
        return plan.listed_loc
    stored: torch.Tensor = getattr(plan, "extend_lens" if name == "extend_seq_lens" else name)
    return stored
