"""The inputs of a cell: KV of several disjoint copies of its batch, pages shuffled, a pool a page size."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

import anyattn
from anyattn.bench.cells import Cell
from anyattn.bench.harness.candidate import rotations
from anyattn.core.kv.pools.packed import PackedPool
from anyattn.core.select.decision import Decision
from anyattn.errors import SelectionError

__all__ = ["Field", "Scene", "copies_of", "decide", "room_for"]

_MOST_COPIES = 24
_MOST_ON_CPU = 4
_KV_SHARE = 0.1
"""Of the memory: KV of all copies in one pool."""
_DRAFTS = 64


def room_for(device: torch.device) -> int:
    """Bytes of free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines)}
        return int(found["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        return 4 << 30


def copies_of(cell: Cell, device: torch.device) -> int:
    """Disjoint batches to rotate through: twice the last cache where memory and patience allow."""
    most = _MOST_COPIES if device.type == "cuda" else _MOST_ON_CPU
    fitting = int(room_for(device) * _KV_SHARE // max(1, cell.stored_bytes))
    return max(1, min(rotations(cell.kv_bytes, device), fitting, most))


@functools.lru_cache(maxsize=256)
def decide(
    cell: Cell, device: torch.device, copies: int, *, host: str | None = None, **choice: Any
) -> Decision:
    """A decision for the cell's layer on its page. `choice`: `backend`, `page_size`, `layout` of `select`.

    A backend that has no prefill is asked for in its phase alone.

    Args:
        host: decided for that machine, with tensors on `device` (stand-ins of libraries).

    Raises:
        SelectionError: nobody serves it, or not the backend that was asked for.
    """
    longest = -(-max(cell.lengths) // cell.page) * cell.page
    limits = anyattn.Limits(
        copies * cell.batch, max(1, cell.tokens), longest,
        max_draft_tokens=_DRAFTS if cell.step == "verify" else 0,
    )  # fmt: skip

    def ask(**options: Any) -> Decision:
        given = {"page_size": cell.page, **choice, **options}
        decision = anyattn.select(
            cell.spec(),
            dtype=cell.torch_dtype,
            kv_dtype=cell.torch_kv_dtype,
            device=device if host is None else None,
            host=host,
            limits=limits,
            **given,
        )
        return replace(decision, request=replace(decision.request, device=str(device)))

    try:
        return ask()
    except SelectionError as refused:
        name = choice.get("backend")
        if name is None:
            raise
        try:
            return ask(**{"backend": None, cell.phase.value: name})
        except SelectionError:
            raise refused from None


@dataclass(frozen=True)
class _Own:
    """k and v of the step's tokens, `[T, Hkv, D]` each, as they are stored."""

    k: torch.Tensor
    v: torch.Tensor


class Scene:
    """KV of `copies` disjoint batches in one pool.

    Attributes:
        pool, table: of the package. pages: int32 `[copies, B, M]` page numbers, 0 behind a request's last.
        lens, query: int32 `[B]` and `[B + 1]`, KV tokens and offsets of the queries, on the device.
    """

    def __init__(self, cell: Cell, decision: Decision, device: torch.device, copies: int) -> None:
        self.cell, self.device, self.copies = cell, device, copies
        self.page = page = decision.kv.page_size
        counts = torch.tensor([-(-n // page) for n in cell.lengths])
        rows, widest, total = copies * cell.batch, int(counts.max()), int(counts.sum()) * copies
        self.pool: Any = anyattn.kv.create_pool(decision, num_slots=total * page)
        self.pages = self._shuffled(counts, widest, total)
        self._fill(total)
        self.table = anyattn.kv.RequestTable(max_requests=rows, max_context=widest * page, device=device)
        offsets = torch.arange(page, device=device)
        slots = self.pages.view(rows, widest, 1) * page + offsets
        self.table.req_to_token[:rows] = slots.view(rows, -1).int()
        self.lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
        news = torch.tensor([0, *cell.news], dtype=torch.int32)
        self.query = news.cumsum(0).int().to(device)

    def _shuffled(self, counts: torch.Tensor, widest: int, total: int) -> torch.Tensor:
        cell, device = self.cell, self.device
        order = (torch.randperm(total, device=device) + 1).int()
        pages = torch.zeros(self.copies, cell.batch, widest, dtype=torch.int32, device=device)
        used = torch.arange(widest, device=device) < counts.to(device)[:, None]
        pages[used.expand_as(pages)] = order
        return pages

    def _fill(self, total: int) -> None:
        """Noise in every slot; 8-bit types have no `normal_`, and big temporaries hurt."""
        pool, cell = self.pool, self.cell
        if isinstance(pool, PackedPool):
            slots = torch.arange(self.page, (total + 1) * self.page, device=self.device)
            for start in range(0, len(slots), 1 << 16):
                part = slots[start : start + (1 << 16)]
                shape = len(part), cell.num_kv
                pool.write(0, part, self._noise(*shape, cell.dim), self._noise(*shape, cell.v_dim))
            return
        for cache in pool.caches(0):
            at_once = max(1, (1 << 28) // max(1, cache[0].numel()))
            for start in range(0, cache.shape[0], at_once):
                part = cache[start : start + at_once]
                part.copy_(self._noise(*part.shape))

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.cell.torch_dtype)

    def rows(self, copy: int) -> list[int]:
        """Rows of the request table."""
        return list(range(copy * self.cell.batch, (copy + 1) * self.cell.batch))

    def new_slots(self, copy: int) -> torch.Tensor:
        """int64 `[T]`: where the step's own tokens lie."""
        table, cell = self.table.req_to_token, self.cell
        parts = zip(self.rows(copy), cell.prefixes, cell.lengths, strict=True)
        return torch.cat([table[row, start:end] for row, start, end in parts]).long()

    def own(self, copy: int) -> _Own:
        """k and v of the step's tokens, from the pool, in the model's dtype."""
        k, v = self.pool.gather(0, self.new_slots(copy))
        return _Own(k.to(self.cell.torch_dtype), v.to(self.cell.torch_dtype))

    def batch(self, copy: int) -> anyattn.ForwardBatch:
        """The step of one copy: lengths on the host, slots of the new tokens."""
        cell, rows, loc = self.cell, self.rows(copy), self.new_slots(copy)
        if cell.step == "decode":
            return anyattn.ForwardBatch.decode(rows, list(cell.lengths), loc)
        parts = rows, list(cell.prefixes), list(cell.news), loc
        if cell.step == "mixed":
            return anyattn.ForwardBatch.mixed(*parts)
        if cell.step == "verify":
            return anyattn.ForwardBatch.verify(*parts)
        return anyattn.ForwardBatch.extend(*parts)

    def csr(self, copy: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pages in CSR form, as FlashInfer plans them: int32 offsets `[B + 1]` and tokens of each last page
        `[B]` on the host, page numbers on the device.
        """
        lens = torch.tensor(self.cell.lengths, dtype=torch.int32)
        counts = -(-lens // self.page)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        used = torch.arange(self.pages.shape[2]) < counts[:, None]
        return offsets, self.pages[copy][used.to(self.device)].contiguous(), (lens - 1) % self.page + 1


class Field:
    """Everything that candidates of one cell share: queries, and a scene for each kind of pool.

    Attributes:
        q: `[T, Hq, D]`.
    """

    def __init__(
        self, cell: Cell, device: torch.device, copies: int | None = None, host: str | None = None
    ) -> None:
        self.cell, self.device, self.host = cell, device, host
        self.copies = copies_of(cell, device) if copies is None else copies
        self.q = torch.randn(cell.tokens, cell.num_q, cell.dim, device=device, dtype=cell.torch_dtype)
        self._scenes: dict[tuple[int, str, str], Scene] = {}

    def decide(self, **choice: Any) -> Decision:
        """As `decide`, for this cell."""
        return decide(self.cell, self.device, self.copies, host=self.host, **choice)

    def scene(self, decision: Decision) -> Scene:
        """The scene whose pool the decision asks for."""
        key = decision.kv.page_size, decision.kv.layout, decision.kv.dtype
        if key not in self._scenes:
            self._scenes[key] = Scene(self.cell, decision, self.device, self.copies)
        return self._scenes[key]

    def paged(self, page: int, layout: str = "NHD") -> Scene:
        """A scene in pages of a size, for who reads it directly.

        Raises:
            SelectionError: no backend takes such a pool, and so nothing makes one.
        """
        key = page, layout, self.cell.kv_dtype
        if key in self._scenes:
            return self._scenes[key]
        return self.scene(self.decide(page_size=page, layout=layout))

    def scenes(self) -> Iterable[Scene]:
        """Those that were made."""
        return self._scenes.values()
