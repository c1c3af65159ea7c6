"""The package's backends as contenders: a planned step, then the layer's call.

The KV of the step is in the pool already, and the write is left out: it is the same kernel for all of them,
and nobody that they are compared with does it. Each is given k and v all the same, for those that read them
there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import anyattn
from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, per_copy
from anyattn.bench.routed import taker
from anyattn.bench.scene import Field, Scene, decide
from anyattn.core.select.decision import Candidate, Decision, Degraded, ReasonCode, Rejected
from anyattn.errors import SelectionError

__all__ = ["backends_of", "chosen"]

_ELSEWHERE = {ReasonCode.ARCHITECTURE, ReasonCode.MODEL_KIND, ReasonCode.PHASE, ReasonCode.NOT_BUILT}
"""Reasons that a reader of results on this device doesn't want to see in every cell."""


def chosen(cell: Cell, device: torch.device, mode: str) -> str | None:
    """The backend that a step like the cell's, run in `mode`, goes to on its page: as selected, and routed.

    None if nobody serves it.
    """
    try:
        return taker(decide(cell, device, 1, route=True), cell, mode)
    except SelectionError:
        return None


def backends_of(
    cell: Cell, device: torch.device, *, degraded: bool
) -> tuple[list[Contender], list[tuple[str, str]]]:
    """`(contenders, [(name, why not)])`. `degraded`: those too that pass with a reservation."""
    try:
        decision = decide(cell, device, 1)
    except SelectionError as error:
        return [], [("every backend", " ".join(str(error).split()))]
    found, skipped = [], []
    for candidate in decision.candidates:
        if candidate.phase is not cell.phase or not candidate.built:
            continue
        why = _why_not(candidate, degraded)
        if why is None:
            found.append(Contender(candidate.backend, "backend", partial(_prepare, candidate.backend)))
        elif why:
            skipped.append((candidate.backend, why))
    return found, skipped


def _why_not(candidate: Candidate, degraded: bool) -> str | None:
    """None: it takes part. Empty: it isn't made for this."""
    verdict = candidate.verdict
    if isinstance(verdict, Degraded):
        return None if degraded else f"degraded: {verdict.reason.allowed}"
    if not isinstance(verdict, Rejected):
        return None
    reasons = [r for r in verdict.reasons if r.code is not ReasonCode.NO_JOINT_LAYOUT]
    if not reasons:
        return None  # asked for by name, it may have a pool of its own
    if any(reason.code in _ELSEWHERE for reason in reasons):
        return ""
    return str(reasons[0])


def _prepare(name: str, field: Field) -> Entrant:
    decision = _decided(name, field)
    scene = field.scene(decision)
    built: Any = anyattn.create_backend(decision, scene.pool, scene.table)
    backend = built.child(field.cell.mode) if hasattr(built, "child") else built
    backend.write_kv = _stored_already
    layer = anyattn.AttentionLayer(field.cell.spec(), 0)
    out = field.q.new_empty(field.cell.tokens, field.cell.num_q, field.cell.v_dim)
    return per_copy(scene, partial(_planned, backend, layer, scene, field.q, out))


def _stored_already(*_: Any) -> None:
    """Instead of a backend's `write_kv`."""


def _planned(
    backend: Any, layer: anyattn.AttentionLayer, scene: Scene, q: torch.Tensor, out: torch.Tensor, copy: int
) -> Any:
    batch, own = scene.batch(copy), scene.own(copy)
    plan = backend.init_forward_metadata(batch)
    k, v = own.k, None if scene.cell.mla else own.v

    def run() -> torch.Tensor:
        with anyattn.forward_context(backend, plan):
            layer(q, k, v, batch, out=out)
        return out

    return run


def _decided(name: str, field: Field) -> Decision:
    """On the pool that most can read, else on whichever it wants."""
    try:
        return field.decide(backend=name, layout="NHD")
    except SelectionError:
        return field.decide(backend=name)
