"""What takes part in a cell: a backend or a library called directly, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from anyattn.bench.scene import Field, Scene

__all__ = ["Contender", "Entrant", "Kind", "NotHere", "per_copy"]

Kind = Literal["backend", "peer"]
Run = Callable[[], torch.Tensor]


class NotHere(Exception):
    """Why a library takes no part in a cell: it isn't installed, or has no call for it."""


@dataclass(frozen=True)
class Entrant:
    """Ready to run.

    Attributes:
        runs: the call for each copy of the KV; each returns the output, `[T, Hq, Dv]` in any shape.
        scene: where its KV lies: what it is judged against.
    """

    runs: Sequence[Run]
    scene: Scene


@dataclass(frozen=True)
class Contender:
    """Somebody who may take part.

    Attributes:
        name: unique in a cell. prepare: builds and plans; raises `NotHere` or whatever the library raises.
        counts: compared with; False for what no engine could do (KV that isn't paged).
        modes: "graph", "eager" or both.
    """

    name: str
    kind: Kind
    prepare: Callable[[Field], Entrant]
    counts: bool = True
    modes: tuple[str, ...] = ("graph", "eager")


def per_copy(scene: Scene, make: Callable[[int], Run]) -> Entrant:
    """An entrant with a call for each copy."""
    return Entrant([make(copy) for copy in range(scene.copies)], scene)
