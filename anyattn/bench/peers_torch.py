"""torch's SDPA on decode: over contiguous K and V, which no engine has; on a CPU after a gather by page."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, per_copy
from anyattn.bench.scene import Field

__all__ = ["contenders"]

_MOST_BYTES = 5 << 30


def contenders(cell: Cell) -> list[Contender]:
    """Where all requests have one length and see all of it: SDPA has neither lengths nor windows here."""
    plain = cell.window is None and cell.kv_dtype == cell.dtype and cell.uniform and cell.step == "decode"
    if not plain or cell.mla:
        return []
    found = [Contender("torch SDPA, gathered", "peer", _gathered)] if cell.modes == ("eager",) else []
    if cell.stored_bytes <= _MOST_BYTES:
        found.append(Contender("torch SDPA, contiguous KV", "peer", _contiguous, counts=False))
    return found


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k, v `[B, S, Hkv, D]`; the query heads of a KV head are rows, so that K and V are read once."""
    batch, heads, dim = q.shape
    folded = q.view(batch, k.shape[2], heads // k.shape[2], dim)
    out = torch.nn.functional.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2))
    return out.reshape(batch, heads, v.shape[-1])


def _contiguous(field: Field) -> Entrant:
    scene, cell = field.paged(field.cell.page), field.cell
    shape = cell.batch, cell.lengths[0], cell.num_kv, cell.dim

    def make(copy: int) -> Callable[[], torch.Tensor]:
        slots = scene.table.req_to_token[scene.rows(copy), : cell.lengths[0]].flatten().long()
        k, v = (x.view(shape) for x in scene.pool.gather(0, slots))
        return lambda: _attend(field.q, k, v)

    return per_copy(scene, make)


def _gathered(field: Field) -> Entrant:
    scene, cell = field.paged(field.cell.page), field.cell
    caches = scene.pool.key_cache(0), scene.pool.value_cache(0)
    width = scene.pages.shape[2]
    room = [c.new_empty(cell.batch * width, *c.shape[1:]) for c in caches]

    def make(copy: int) -> Callable[[], torch.Tensor]:
        pages = scene.pages[copy].flatten().long()

        def run() -> torch.Tensor:
            k, v = (
                torch.index_select(cache, 0, pages, out=space).view(cell.batch, -1, cell.num_kv, cell.dim)
                for cache, space in zip(caches, room, strict=True)
            )
            return _attend(field.q, k[:, : cell.lengths[0]], v[:, : cell.lengths[0]])

        return run

    return per_copy(scene, make)
