"""Right before fast: outputs against attention in float32 over what the pool holds, on sampled rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.scene import Scene

__all__ = ["bound_of", "relative_error"]

_ROWS = 24
"""Query tokens that are looked at in a request, from both ends."""


def bound_of(cell: Cell) -> float:
    """Relative L2 error that is allowed: rounding of inputs and output, and of 8-bit queries."""
    if cell.torch_kv_dtype.itemsize == 1:
        return 8e-2
    return {"float32": 1e-4, "float16": 5e-3}.get(cell.dtype, 2e-2)


def relative_error(out: torch.Tensor, q: torch.Tensor, scene: Scene) -> float:
    """Largest |out - reference| / |reference| (L2) over sampled requests of copy 0.

    `out`: of all query tokens, `[T, Hq, Dv]` in any shape. NaN gives infinity.
    """
    cell = scene.cell
    out = out.reshape(cell.tokens, cell.num_q, cell.v_dim)
    worst = 0.0
    for request, tokens in _sampled(cell):
        want = _reference(cell, scene, request, q, tokens)
        got = out[_offset(cell, request) + tokens].float()
        error = float((got - want).norm() / want.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _sampled(cell: Cell) -> Iterator[tuple[int, torch.Tensor]]:
    """The longest request, the first and the last; tokens of each."""
    longest = max(range(cell.batch), key=lambda i: cell.lengths[i])
    for request in dict.fromkeys((longest, 0, cell.batch - 1)):
        new = cell.news[request]
        yield request, torch.tensor(sorted({*range(min(new, _ROWS)), *range(max(0, new - _ROWS), new)}))


def _offset(cell: Cell, request: int) -> int:
    return sum(cell.news[:request])


def _reference(cell: Cell, scene: Scene, request: int, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 `[n, Hq, Dv]` of the given tokens of a request."""
    slots = scene.table.req_to_token[request, : cell.lengths[request]].long()
    k, v = (x.float() for x in scene.pool.gather(0, slots))
    spec = cell.spec()
    rows = q[_offset(cell, request) + tokens.to(q.device)].float()
    group = cell.num_q // cell.num_kv
    rows = rows.view(len(tokens), cell.num_kv, group, cell.dim)
    logits = torch.einsum("nhgd,khd->nhgk", rows, k) * spec.scale
    position = (cell.prefixes[request] + tokens).to(q.device)[:, None]
    keys = torch.arange(k.shape[0], device=q.device)
    hidden = keys > position
    if cell.window is not None:
        hidden = hidden | (keys <= position - cell.window)
    logits.masked_fill_(hidden[:, None, None], float("-inf"))
    out = torch.einsum("nhgk,khd->nhgd", logits.softmax(-1), v)
    return out.reshape(len(tokens), cell.num_q, cell.v_dim)
