"""The grid: which shapes are timed, and their inputs. One `Scene` holds the KV of a cell, pages shuffled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import anyattn
from anyattn.bench.harness import Work, rotations
from anyattn.core.kv import MHAPool

__all__ = ["DECODE", "EXTEND", "Cell", "Scene", "copies_of"]

_MAX_KV_BYTES = 60e9


@dataclass(frozen=True)
class Cell:
    """`batch` requests of `prefix` cached and `new` tokens; heads Hq/Hkv of size `dim`."""

    batch: int
    prefix: int
    new: int = 1
    num_q: int = 32
    num_kv: int = 8
    dim: int = 128
    page: int = 16
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def length(self) -> int:
        """KV tokens of a request."""
        return self.prefix + self.new

    def __str__(self) -> str:
        what = f"{self.prefix}+{self.new}" if self.new > 1 else f"{self.length}"
        fp8 = " fp8" if self.kv_dtype.itemsize == 1 else ""
        return f"{self.batch} x {what} ({self.num_q}/{self.num_kv}, D {self.dim}, page {self.page}{fp8})"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call reads."""
        return 2 * self.batch * self.length * self.num_kv * self.dim * self.kv_dtype.itemsize

    def work(self) -> Work:
        """Bytes and floating-point operations of a causal call."""
        pairs = self.batch * (self.new * self.prefix + self.new * (self.new + 1) / 2)
        io = 2 * self.batch * self.new * self.num_q * self.dim * 2
        return Work(bytes=self.kv_bytes + io, flops=4 * self.num_q * self.dim * pairs)

    def spec(self) -> anyattn.AttentionSpec:
        """The layer."""
        return anyattn.AttentionSpec(num_q_heads=self.num_q, num_kv_heads=self.num_kv, head_dim=self.dim)


DECODE = (
    Cell(1, 1023),
    Cell(1, 8191),
    Cell(16, 8191),
    Cell(64, 8191),
    Cell(256, 1023),
    Cell(8, 65535),
    Cell(128, 2047),
    Cell(64, 8191, num_q=64),
    Cell(64, 8191, num_q=8, num_kv=1),
    Cell(64, 4095, num_q=28, num_kv=4),
    Cell(64, 4095, num_kv=32),
    Cell(64, 8191, page=1),
    Cell(64, 8191, page=64),
    Cell(16, 8191, dim=64),
    Cell(16, 8191, num_q=16, dim=256),
)

EXTEND = (
    Cell(1, 0, 8192),
    Cell(8, 0, 4096),
    Cell(32, 0, 1024),
    Cell(1, 0, 32768),
    Cell(8, 16384, 512),
    Cell(64, 2048, 64),
    Cell(64, 2048, 4),
    Cell(1, 0, 8192, num_q=64),
    Cell(1, 0, 8192, num_q=8, num_kv=1),
    Cell(1, 0, 8192, page=64),
    Cell(1, 0, 8192, dim=64),
)


def copies_of(cell: Cell, device: torch.device) -> int:
    """Disjoint sets of requests to rotate through, so that no call finds its KV in the L2 cache."""
    return min(rotations(cell.kv_bytes, device), max(1, int(_MAX_KV_BYTES // cell.kv_bytes)))


class Scene:
    """KV of `copies` disjoint batches in one pool, and a backend on it.

    Attributes:
        q, k, v: `[T, H, D]` inputs of a step. pages: int32 `[copies, B, pages]`, physical pages.
    """

    def __init__(self, cell: Cell, backend: str | None, device: torch.device, copies: int) -> None:
        self.cell, self.device, self.copies = cell, device, copies
        batch, length = cell.batch, cell.length
        per_request = -(-length // cell.page)
        pages = copies * batch * per_request
        limits = anyattn.Limits(copies * batch, max(1, batch * cell.new), per_request * cell.page)
        decision = anyattn.select(
            cell.spec(), dtype=torch.bfloat16, kv_dtype=cell.kv_dtype, device=str(device), limits=limits,
            page_size=cell.page, layout="NHD", backend=backend,
        )  # fmt: skip
        pool = anyattn.kv.create_pool(decision, num_slots=pages * cell.page)
        assert isinstance(pool, MHAPool)
        self.pool = pool
        for cache in (pool.key_cache(0), pool.value_cache(0)):
            for part in torch.split(cache, 4096):  # in parts: normal_ has no fp8, and big temporaries hurt
                part.copy_(torch.randn(part.shape, device=device, dtype=torch.bfloat16))
        self.table = anyattn.kv.RequestTable(
            max_requests=copies * batch, max_context=per_request * cell.page, device=device
        )
        order = (torch.randperm(pages, device=device) + 1).view(copies * batch, per_request)
        self.pages = order.view(copies, batch, per_request).int()
        slots = order[:, :, None] * cell.page + torch.arange(cell.page, device=device)
        self.table.req_to_token[: copies * batch] = slots.view(copies * batch, -1).int()
        self.backend = anyattn.create_backend(decision, pool, self.table)
        self.layer = anyattn.AttentionLayer(cell.spec(), 0)
        tokens = batch * cell.new
        self.q, self.k, self.v = (
            torch.randn(tokens, heads, cell.dim, device=device, dtype=torch.bfloat16)
            for heads in (cell.num_q, cell.num_kv, cell.num_kv)
        )

    def batch(self, copy: int) -> anyattn.ForwardBatch:
        """The step of one copy: lengths on the host, slots of the new tokens."""
        cell = self.cell
        rows = list(range(copy * cell.batch, (copy + 1) * cell.batch))
        loc = self.table.req_to_token[rows[0] : rows[-1] + 1, cell.prefix : cell.length].flatten().long()
        if cell.new == 1:
            return anyattn.ForwardBatch.decode(rows, [cell.length] * cell.batch, loc)
        return anyattn.ForwardBatch.extend(rows, [cell.prefix] * cell.batch, [cell.new] * cell.batch, loc)
